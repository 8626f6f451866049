/* The overview of a run: key figures, curves, distributions, and episodes worth a look. */

/* Of several names the first that the run has. */
const FIRST_METRICS = [
  "reward",
  ["eval/with_tool/accuracy", "eval/with_tool/reward"],
  ["eval/no_tools/accuracy", "eval/no_tools/reward"],
  "turns",
  "curriculum/solved",
  "curriculum/learnable",
  "curriculum/unsolved",
  "rollout_train_kl",
  "entropy",
  "grad_norm",
  "tokens_per_s",
];

/* More phases than this are chosen from a list. */
const MAX_BUTTONS = 6;

function showOverview(root, { query }) {
  const run = runOf(query);
  const state = { metrics: query.curves ? query.curves.split(",") : null, phase: query.phase || "" };
  const parts = {
    head: make("section.head"),
    curves: make("section"),
    spread: make("section"),
    notable: make("section"),
  };
  add(root, Object.values(parts));
  const save = () =>
    setAddress(
      link([], runQuery(run.number, { curves: state.metrics && state.metrics.join(","), phase: state.phase })),
    );
  const drawCurves = () =>
    add(
      clear(parts.curves),
      overviewCurves(run, state, () => {
        save();
        drawCurves();
      }),
    );
  const update = () => {
    add(clear(parts.head), overviewHead(run));
    if (!parts.curves.contains(document.activeElement)) drawCurves();
    add(
      clear(parts.spread),
      overviewSpread(run, state, () => {
        save();
        update();
      }),
    );
    add(clear(parts.notable), overviewNotable(run));
  };
  update();
  return { title: run.name, update };
}

function overviewHead(run) {
  const made = run.manifest.created ? new Date(run.manifest.created) : null;
  const facts = [
    run.env && ["environment", run.env],
    modelName(run) && ["model", modelName(run)],
    made && !Number.isNaN(made.getTime()) && ["recorded", made.toISOString().slice(0, 16).replace("T", " ") + " UTC"],
  ].filter(Boolean);
  const line = make(
    "p.facts",
    facts.map(([name, value]) =>
      make("span", make("span.name", { text: name }), " ", make("bdi", { text: visible(value) })),
    ),
  );
  return [
    make("h1", { tabindex: "-1", text: visible(run.name) }),
    line,
    make("dl.key-figures", keyFigures(run).map(keyFigure)),
  ];
}

/* [[name, value, note, change], ...] */
function keyFigures(run) {
  const found = heldOut(run.summary || {});
  const best = (run.summary && run.summary.best) || {};
  if (isNumber(best.step)) {
    const [name, value] = isNumber(best.accuracy)
      ? ["best accuracy", percent(best.accuracy)]
      : ["best mean reward", reward(best.mean_reward)];
    found.push([name, value, `held out, after step ${count(best.step)}`]);
  }
  const rewards = metricPoints(run, "reward");
  if (rewards.length > 1)
    found.push([
      "reward in training",
      `${reward(rewards[0][1])} → ${reward(rewards.at(-1)[1])}`,
      `steps ${rewards[0][0]} to ${rewards.at(-1)[0]}`,
    ]);
  else if (run.size) found.push(["mean reward", reward(mean(run.columns.reward)), "all episodes"]);
  if (run.metrics.length)
    found.push([
      "steps",
      count(run.metrics.at(-1).step ?? run.metrics.length),
      run.summary && isNumber(run.summary.seconds) ? `in ${seconds(run.summary.seconds)}` : run.live ? "so far" : "",
    ]);
  const tools = sum(run.columns.num_tool_calls),
    errors = sum(run.columns.num_tool_errors);
  found.push(["episodes", count(run.size), `${figure(mean(run.columns.num_turns))} turns each`]);
  found.push([
    "model tokens",
    compactCount(sum(run.columns.num_model_tokens)),
    `of ${compactCount(sum(run.columns.num_tokens))}`,
  ]);
  if (tools) found.push(["tool calls", count(tools), errors ? `${count(errors)} not ok` : "all ok"]);
  const gap = most((run.columns.max_gap || []).filter(isNumber));
  if (isNumber(gap)) found.push(["largest gap", figure(gap), "nats, rollout to trainer"]);
  return found;
}

/* Accuracy before and after training for each way of the summary, or mean reward where the environment knows no
   success: [[name, value, note, change], ...] */
function heldOut(summary) {
  const isTable = (value) => value && typeof value === "object";
  const has = (name) => isTable(summary[name]) && Object.keys(summary[name]).length > 0;
  const hasSuccess = has("accuracy_before") || has("accuracy_after");
  const [name, title, say] = hasSuccess ? ["accuracy", "accuracy", percent] : ["mean_reward", "mean reward", reward];
  const [before, after, interval] = [summary[`${name}_before`], summary[`${name}_after`], summary.interval_after];
  const ways = isTable(after) ? Object.keys(after) : isTable(before) ? Object.keys(before) : [];
  return ways.map((way) => {
    const [from, to] = [isTable(before) ? before[way] : null, isTable(after) ? after[way] : null];
    const [low, high] = (isTable(interval) && interval[way]) || [];
    const text =
      isNumber(from) && isNumber(to) ? `${say(from)} → ${say(to)}` : say(isNumber(to) ? to : from);
    return [
      `${title} ${way.replaceAll("_", " ")}`,
      text,
      isNumber(low) ? `95%: ${say(low)} to ${say(high)}` : "",
      isNumber(from) && isNumber(to) ? Math.sign(to - from) : 0,
    ];
  });
}

function keyFigure([name, value, note, change]) {
  const tone = change > 0 ? ".is-up" : change < 0 ? ".is-down" : "";
  return make(
    ".key-figure",
    make("dt", { text: visible(name) }),
    make(`dd${tone}`, { text: value }),
    make("dd.note", { text: note || "" }),
  );
}

function sum(values) {
  return (values || []).reduce((a, b) => a + (isNumber(b) ? b : 0), 0);
}

function mean(values) {
  const found = (values || []).filter(isNumber);
  return found.length ? sum(found) / found.length : null;
}

function overviewCurves(run, state, changed) {
  const names = metricNames([run]);
  if (!names.length) return [];
  const has = (name) => names.includes(name);
  const shown = (state.metrics || FIRST_METRICS.map((choice) => [choice].flat().find(has))).filter(has);
  const pick = (metrics) => {
    state.metrics = metrics;
    changed();
  };
  const chooser = curveChooser(names, shown, pick);
  const set = [];
  const charts = shown.map((name) => {
    const open = (step) => {
      const phase = name.startsWith("eval/") ? `eval-${step}` : "train";
      if (step !== null) goTo(link(["episodes"], runQuery(run.number, { phase, from: step, to: step })));
    };
    const chart = lineChart(name, [{ run: run.number, points: metricPoints(run, name) }], set, open);
    chart.append(
      button("×", () => pick(shown.filter((each) => each !== name)), {
        class: "remove",
        "aria-label": `remove ${name}`,
        title: "remove",
      }),
    );
    return chart;
  });
  return [
    make(
      ".section-head",
      make("h2", { text: "Curves" }),
      make("p.hint", { text: "click a step, or ← → and Enter, to see its episodes" }),
      chooser,
    ),
    make(".charts", charts),
  ];
}

function curveChooser(names, shown, pick) {
  const others = names.filter((name) => !shown.includes(name)).map((name) => [name, name]);
  return select("add a curve", [["", "add a curve …"], ...others], "", (name) => name && pick([...shown, name]));
}

function overviewSpread(run, state, changed) {
  if (!run.size)
    return [make("p.none", { text: run.live ? "no episode has ended yet" : "the recording holds no episode" })];
  const phases = tally(run, "phase").map(([phase]) => phase);
  const places = chosenPlaces(run, state.phase ? { phase: state.phase } : {});
  const to = (query) => link(["episodes"], runQuery(run.number, { phase: state.phase, ...query }));
  const ends = tally(run, "end_reason", places).map(([name, times]) => ({
    name,
    count: times,
    href: to({ end: name }),
    tone: endTone(name),
  }));
  const rewards = places.map((place) => run.columns.reward[place]);
  const switcher = (phases.length > MAX_BUTTONS ? select : choice)(
    "phase",
    [["", "all"], ...phases.map((phase) => [phase, visible(phase)])],
    state.phase,
    (phase) => {
      state.phase = phase;
      changed();
    },
  );
  return [
    make(
      ".section-head",
      make("h2", { text: "Episodes" }),
      phases.length > 1 && switcher,
      make("a.go", { href: to({}), text: `all ${count(places.length)} in a table` }),
    ),
    make(
      ".panels",
      make(
        ".panel",
        make("h3", { text: "Rewards" }),
        histogram("rewards", rewards, ({ low, high }) => to({ min: low, max: high })),
      ),
      make(".panel", make("h3", { text: "End reasons" }), barList("end reasons", ends), fateBars(run, places, to)),
    ),
  ];
}

function fateBars(run, places, to) {
  const fates = tally(run, "fate", places).filter(([fate]) => fate);
  if (fates.length < 2) return [];
  return [
    make("h3", { text: "Fates" }),
    barList(
      "fates",
      fates.map(([name, times]) => ({ name, count: times, href: to({ fate: name }) })),
    ),
  ];
}

const NOTABLE = [
  [
    "Broken",
    "-step",
    (run, p) => visible(run.columns.error[p] || run.columns.end_reason[p]),
    (run, p) => endTone(run.columns.end_reason[p]) === "fault",
  ],
  [
    "Largest gap",
    "-max_gap",
    (run, p) => `${figure(run.columns.max_gap[p])} nats`,
    (run, p) => run.columns.max_gap[p] > 0,
  ],
  [
    "Least probable",
    "mean_logprob",
    (run, p) => `${figure(run.columns.mean_logprob[p])} nats a token`,
    (run, p) => isNumber(run.columns.mean_logprob[p]),
  ],
  ["Longest", "-num_tokens", (run, p) => plural(run.columns.num_tokens[p], "token"), () => true],
  [
    "Most tool errors",
    "-num_tool_errors",
    (run, p) => `${run.columns.num_tool_errors[p]} of ${plural(run.columns.num_tool_calls[p], "call")}`,
    (run, p) => run.columns.num_tool_errors[p] > 0,
  ],
  ["Slowest environment", "-env_s", (run, p) => seconds(run.columns.env_s[p]), () => true],
];

function overviewNotable(run) {
  const panels = NOTABLE.map(([title, order, say, isOne]) => {
    const places = sorted(
      run,
      [...Array(run.size).keys()].filter((place) => isOne(run, place)),
      order,
    ).slice(0, 4);
    if (!places.length) return null;
    return make(
      ".panel",
      make("h3", { text: title }),
      make(
        "ol.notable",
        places.map((place) =>
          make(
            "li",
            make(
              "a",
              { href: episodeLink(run.number, run.columns.id[place], order === "-max_gap" ? { color: "gap" } : {}) },
              make("bdi", { text: visible(run.columns.id[place]) }),
            ),
            make("span", { text: say(run, place), dir: "auto" }),
          ),
        ),
      ),
    );
  });
  return [make(".section-head", make("h2", { text: "Worth a look" })), make(".panels.is-narrow", panels)];
}
