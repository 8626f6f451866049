/* The samples of one group side by side, below their problem. */

function showGroup(root, { parts, query }) {
  const run = runOf(query);
  const [, phase, way, number] = parts;
  const places = groupOf(run, phase, way, number);
  if (!places.length)
    return missing(root, `${visible(run.name)} holds no group ${visible(parts.slice(1).join(" / "))}`);
  const problem = make(".problem");
  const body = make("div");
  const known = () => knownOf(run, groupOf(run, phase, way, number));
  const state = { query: { ...query }, known: known() };
  const changed = (part) => {
    Object.assign(state.query, part);
    const { color, ref, order } = state.query;
    setAddress(groupLink(run.number, run.columns, places[0], { color, ref, order }));
    drawSamples();
  };
  const drawSamples = () => {
    const now = groupOf(run, phase, way, number);
    drawGroup(body, run, state.query.order === "reward" ? sorted(run, now, "-reward") : now, state.query, changed);
  };
  const { before, after } = groupNeighbours(run, places);
  const head = groupHead(run, places, before, after);
  add(root, [head, problem, body]);
  drawSamples();
  drawProblem(problem, run, places[0]);
  return {
    title: `Group ${visible(number)}`,
    update: () => {
      const now = known();
      if (now === state.known) return;
      state.known = now;
      const figures = groupFigures(run, groupOf(run, phase, way, number));
      add(clear(head.querySelector(".verdict")), factBoxes(figures));
      drawSamples();
    },
    keys: {
      ...colorKeys(state.query, changed),
      Escape: () => goTo(listHref(run)),
      j: () => after && goTo(after),
      k: () => before && goTo(before),
    },
  };
}

/* The values of the samples that can still change, as text; the samples are drawn again when it changes. */
function knownOf({ columns }, places) {
  const names = ["id", "num_tokens", "reward", "advantage", "fate", "kl", "max_gap"];
  return JSON.stringify(places.map((place) => names.map((name) => columns[name][place])));
}

function groupHead(run, places, before, after) {
  const { phase, way, group } = run.columns;
  const crumbs = [
    make("a", { href: listHref(run), text: "Episodes" }),
    make("span", { text: playedFor(phase[places[0]], way[places[0]]) }),
  ];
  const steps = [stepLink(before, "←", "previous group"), stepLink(after, "→", "next group")];
  return viewHead(crumbs, `Group ${group[places[0]]}`, groupFigures(run, places), steps);
}

function drawGroup(body, run, places, query, changed) {
  const look = lookOf(query);
  const orders = [
    ["", "by sample"],
    ["reward", "by reward"],
  ];
  const order = choice("order", orders, query.order || "", (value) => changed({ order: value, ref: "" }));
  const items = places.map((place) => ({ run, place, name: sampleName(run, place) }));
  add(clear(body), [add(besideTools(look, changed), [order]), besideView(items, look, changed)]);
}

/* How the query says that columns are drawn. */
function lookOf({ color, ref }) {
  return { color: Object.values(COLORS).includes(color) ? color : "", reference: numberOf(ref) };
}

function sampleName(run, place) {
  const { sample_index: sample, attempt } = run.columns;
  return `sample ${sample[place]}${attempt[place] ? ` · attempt ${attempt[place] + 1}` : ""}`;
}

function groupFigures(run, places) {
  const { columns } = run,
    rewards = places.map((place) => columns.reward[place]).filter(isNumber),
    middle = mean(rewards);
  const spreadOf = rewards.length ? Math.sqrt(mean(rewards.map((value) => (value - middle) ** 2))) : null;
  return [
    ["samples", count(places.length)],
    ["mean reward", reward(middle)],
    ["spread", reward(spreadOf)],
    columns.label[places[0]] && ["label", visible(columns.label[places[0]])],
    ["step", count(columns.step[places[0]])],
    ["problem", visible(columns.sample_id[places[0]])],
  ].filter(Boolean);
}

/* Links to the groups before and after, in the order in which groups ended. */
function groupNeighbours(run, places) {
  const groups = [...run.groups.values()];
  const at = groups.findIndex((group) => group.includes(places[0]));
  const to = (group) => group && groupLink(run.number, run.columns, group[0]);
  return { before: to(groups[at - 1]), after: to(groups[at + 1]) };
}

async function drawProblem(box, run, place) {
  const episode = await app.source.episode(run.number, place).catch(() => null);
  const messages = episode ? openingOf(episode).slice(0, episode.num_prompt_messages) : [];
  const shown = messages.filter((message, k) => message.role !== "system" || messages.length === 1 || k > 0);
  add(
    clear(box),
    shown.map((message) => messageBox(run, message)),
  );
}
