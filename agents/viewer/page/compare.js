/* Compares two runs: their curves in one chart, their rewards problem by problem, matching episodes side by side. */

function showCompare(root, route) {
  if (app.runs.length < 2)
    return missing(root, "This page holds one run. Give two to python -m agents.view to compare them.");
  return route.parts.length > 1 ? showPair(root, route) : showRuns(root, route);
}

/* The problems of both runs: [{key, phase, way, sample_id, places: [[...], [...]], first, second, change}]. */
function problemsOf(runs) {
  const found = new Map();
  runs.forEach((run, k) => {
    const { phase, way, sample_id: sample, reward: rewards } = run.columns;
    for (let place = 0; place < run.size; place += 1) {
      const key = [phase[place], way[place], sample[place]].map(encoded).join("/");
      if (!found.has(key))
        found.set(key, {
          key,
          phase: phase[place],
          way: way[place],
          sample_id: sample[place],
          places: [[], []],
          sums: [0, 0],
          counts: [0, 0],
        });
      const problem = found.get(key);
      problem.places[k].push(place);
      if (isNumber(rewards[place])) {
        problem.sums[k] += rewards[place];
        problem.counts[k] += 1;
      }
    }
  });
  return [...found.values()].map((problem) => {
    const [first, second] = problem.sums.map((total, k) => (problem.counts[k] ? total / problem.counts[k] : null));
    return { ...problem, first, second, change: isNumber(first) && isNumber(second) ? second - first : null };
  });
}

function showRuns(root, { query }) {
  const state = { query: { ...query }, problems: [], table: null };
  const box = make(".table-box");
  const status = make("p.shown", { role: "status" });
  const change = (part) => {
    Object.assign(state.query, part);
    setAddress(link(["compare"], state.query));
    drawTable();
  };
  const drawTable = () => {
    state.problems = problemsOf(app.runs);
    const kept = keptProblems(state.problems, state.query);
    status.textContent = `${count(kept.length)} of ${plural(state.problems.length, "problem")}`;
    state.table = makeTable(problemColumns(state.problems), {
      label: "problems",
      order: state.query.sort || "",
      onSort: (sort) => change({ sort }),
    });
    clear(box).append(state.table.node);
    setPlaces(state.table, kept, false);
  };
  const title = make("h2", { text: "Problem by problem" });
  add(root, [
    make("section.head", compareHead()),
    compareCurves(state.query),
    make("section", make(".section-head", title, problemFilters(state.query, change), status), box),
  ]);
  drawTable();
  const open = () => state.table.at >= 0 && goTo(pairLink(state.problems[state.table.places[state.table.at]]));
  return {
    title: "Compare",
    update: drawTable,
    keys: { ...rowKeys(state), Enter: open },
    arrows: true,
  };
}

function problemFilters(query, change) {
  const phases = [...new Set(app.runs.flatMap((run) => run.columns.phase || []))];
  const kinds = [
    ["", "all"],
    ["both", "in both"],
    ["up", "better in the second"],
    ["down", "worse in the second"],
  ];
  const options = [["", "phase: all"], ...phases.map((phase) => [phase, visible(phase)])];
  return make(
    ".filters",
    select("phase", options, query.phase || "", (phase) => change({ phase })),
    choice("which", kinds, query.which || "", (which) => change({ which })),
  );
}

function compareCurves(query) {
  const names = metricNames(app.runs);
  const shown = (query.curves ? query.curves.split(",") : FIRST_METRICS).filter((name) => names.includes(name));
  if (!names.length) return null;
  const series = (name) => app.runs.map((run) => ({ run: run.number, points: metricPoints(run, name) }));
  const set = [];
  const charts = shown.map((name) => lineChart(name, series(name), set, null));
  const chooser = curveChooser(names, shown, (curves) =>
    goTo(link(["compare"], { ...query, curves: curves.join(",") })),
  );
  const head = make(".section-head", make("h2", { text: "Curves" }), chooser);
  return make("section", head, make(".charts", charts));
}

function keptProblems(problems, { phase, which, sort }) {
  const tests = { both: (p) => p.change !== null, up: (p) => p.change > 0, down: (p) => p.change < 0 };
  const kept = [...problems.keys()].filter(
    (k) => (!phase || problems[k].phase === phase) && (!tests[which] || tests[which](problems[k])),
  );
  const column = (name) => problems.map((problem) => problem[name]);
  const columns = Object.fromEntries(
    ["change", "first", "second", "sample_id", "phase"].map((name) => [name, column(name)]),
  );
  return sorted({ columns }, kept, sort || "");
}

function compareHead() {
  const [a, b] = app.runs;
  const names = [a, b].map((run) =>
    make(`span.series-${run.number}.run-name`, make("bdi", { text: visible(run.name) })),
  );
  const rows = [
    [
      "mean reward in training",
      (run) => reward(mean(run.columns.reward.filter((_, place) => run.columns.phase[place] === "train"))),
    ],
    ["episodes", (run) => count(run.size)],
    ["steps", (run) => count(run.metrics.length)],
  ];
  for (const way of new Set(app.runs.flatMap((run) => heldOut(run.summary || {}).map(([name]) => name)))) {
    rows.unshift([way, (run) => (heldOut(run.summary || {}).find(([name]) => name === way) || [])[1] || NONE]);
  }
  const figures = rows.map(([name, say]) =>
    make(
      ".key-figure",
      make("dt", { text: visible(name) }),
      app.runs.map((run) => make(`dd.series-${run.number}`, { text: say(run) })),
    ),
  );
  return [
    make("h1", { tabindex: "-1" }, names[0], make("span.versus", { text: " and " }), names[1]),
    make("dl.key-figures", figures),
  ];
}

function problemColumns(problems) {
  const say = (name, title, kind, draw, hint) => ({
    name,
    title,
    kind,
    hint,
    fill: (cell, k) => draw(cell, problems[k]),
  });
  const value = (number) => (cell, problem) => {
    const found = number ? problem.second : problem.first,
      times = problem.places[number].length;
    cell.textContent = times ? `${reward(found)}${times > 1 ? ` (${times})` : ""}` : NONE;
    cell.dataset.tone = rewardTone(found, app.runs[number].columns, problem.places[number]);
  };
  const sample = (problem) => {
    const k = problem.places[0].length ? 0 : 1;
    return [app.runs[k], problem.places[k][0]];
  };
  return [
    {
      name: "image",
      kind: "thumb",
      title: "",
      fill: (cell, k, row) => {
        const [run, place] = sample(problems[k]);
        thumbnail(run, cell, place, row);
      },
    },
    say("sample_id", "problem", "id", (cell, problem) =>
      clear(cell).append(
        make("a.row-link", { href: pairLink(problem) }, make("bdi", { text: visible(problem.sample_id) })),
      ),
    ),
    say("first", visible(app.runs[0].name), "figure", value(0), "mean reward, and of how many episodes"),
    say("second", visible(app.runs[1].name), "figure", value(1), "mean reward, and of how many episodes"),
    say("change", "change", "figure", (cell, problem) => {
      cell.textContent = signed(problem.change);
      cell.dataset.tone = problem.change > 0 ? "high" : problem.change < 0 ? "fault" : "none";
    }),
    say("phase", "played for", "end", (cell, problem) => {
      cell.textContent = playedFor(problem.phase, problem.way);
    }),
    {
      ...say("question", "question", "long", (cell, problem) => {
        const [run, place] = sample(problem);
        cell.textContent = visible(run.columns.question[place] ?? "").replace(/\s+/g, " ");
        cell.dir = "auto";
      }),
      isFixed: true,
    },
  ];
}
