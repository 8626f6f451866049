/* One problem in two runs: their episodes in pairs. */

function showPair(root, { parts, query }) {
  const key = parts.slice(1).map(encoded).join("/");
  const problems = problemsOf(app.runs);
  const at = problems.findIndex((each) => each.key === key);
  const problem = problems[at];
  if (!problem) return missing(root, `neither run holds ${visible(parts.slice(1).join(" / "))}`);
  const state = { query: { ...query } };
  const body = make("div");
  const shared = make(".problem");
  const changed = (part) => {
    Object.assign(state.query, part);
    setAddress(pairLink(problem, state.query));
    drawPair();
  };
  const drawPair = () => {
    const look = { ...lookOf(state.query), isPaired: true };
    add(clear(body), [besideTools(look, changed), besideView(pairsOf(problem).flat(), look, changed)]);
  };
  const to = (k) => problems[k] && pairLink(problems[k], { color: state.query.color });
  add(root, [pairHead(problem, to(at - 1), to(at + 1)), shared, body]);
  drawPair();
  const k = problem.places[0].length ? 0 : 1;
  drawProblem(shared, app.runs[k], problem.places[k][0]);
  return {
    title: visible(problem.sample_id),
    keys: {
      ...colorKeys(state.query, changed),
      j: () => to(at + 1) && goTo(to(at + 1)),
      k: () => to(at - 1) && goTo(to(at - 1)),
      Escape: () => goTo("#/compare"),
    },
  };
}

function pairHead(problem, before, after) {
  const crumbs = [
    make("a", { href: "#/compare", text: "Compare" }),
    make("span", { text: playedFor(problem.phase, problem.way) }),
  ];
  const facts = app.runs.map((run, k) => [visible(run.name), reward(k ? problem.second : problem.first)]);
  const steps = [stepLink(before, "←", "previous problem"), stepLink(after, "→", "next problem")];
  return viewHead(crumbs, visible(problem.sample_id), facts, steps);
}

function pairLink(problem, query) {
  return link(["compare", problem.phase, problem.way, problem.sample_id], query);
}

/* Samples of both runs, paired in order of step and sample: [[item of the first, item of the second], ...]. */
function pairsOf({ places }) {
  const ordered = app.runs.map(({ columns }, k) =>
    [...places[k]].sort(
      (a, b) =>
        columns.step[a] - columns.step[b] ||
        columns.sample_index[a] - columns.sample_index[b] ||
        columns.attempt[a] - columns.attempt[b],
    ),
  );
  const item = (k, place) =>
    place === undefined
      ? null
      : {
          run: app.runs[k],
          place,
          name: sampleName(app.runs[k], place),
          above: `${app.runs[k].name} · step ${app.runs[k].columns.step[place]}`,
        };
  return Array.from({ length: Math.max(...ordered.map((each) => each.length)) }, (_, row) =>
    ordered.map((each, k) => item(k, each[row])),
  );
}
