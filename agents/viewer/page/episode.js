/* One episode: its figures, its conversation or its tokens, and links to its neighbours. */

const COLORS = { 1: "mask", 2: "probability", 3: "gap" };

function showEpisode(root, { parts, query }) {
  const run = runOf(query);
  const place = run.byId.get(encoded(parts[1] ?? ""));
  if (place === undefined) return missing(root, `${visible(run.name)} holds no episode ${visible(parts[1] ?? "")}`);
  const color = Object.values(COLORS).includes(query.color) ? query.color : null;
  const state = {
    run,
    place,
    query: { ...query, color },
    episode: null,
    stream: null,
    view: null,
    box: make(".episode-main"),
    side: make("aside.side", { "aria-label": "facts" }),
  };
  const id = run.columns.id[place];
  if (app.list && app.list.run === run.number) app.list.selected = place;
  state.href = (change) =>
    episodeLink(run.number, id, {
      turn: state.query.turn,
      color: state.query.color,
      scale: state.query.scale,
      stream: state.query.stream,
      token: state.query.color ? state.query.token : null,
      ...change,
    });
  state.change = (part) => {
    Object.assign(state.query, part);
    setAddress(state.href({}));
  };
  state.tools = make(".episode-tools");
  add(root, [
    episodeHead(state),
    make(".strip-box"),
    make(".episode", make(".episode-left", state.tools, state.box), state.side),
  ]);
  app.source
    .episode(run.number, place)
    .then((episode) => {
      if (!root.contains(state.box)) return;
      takeEpisode(state, episode);
      drawEpisode(state);
      if (state.query.turn) showTurn(state, Number(state.query.turn), false);
      if (state.tokens && numberOf(state.query.token) !== null) state.tokens.showToken(Number(state.query.token), true);
    })
    .catch((error) =>
      state.box.append(make("p.none", { role: "alert", text: `This episode could not be read: ${error.message}` })),
    );
  return {
    title: visible(id),
    keys: episodeKeys(state),
    update: () => updateEpisode(state),
    repaint: () => state.strip && state.strip.draw(),
  };
}

/* Takes an episode that was read, and the stream of it that the address names. */
function takeEpisode(state, episode) {
  state.episode = episode;
  state.streams = streamsOf(episode);
  takeStream(state, (numberOf(state.query.stream) ?? 1) - 1);
}

function takeStream(state, number) {
  state.part = state.streams[number] || state.streams[0];
  state.stream = readStream(state.run, state.part);
  clear(document.querySelector(".strip-box")).append(streamStrip(state));
}

/* Shows the tokens of another stream of the episode. */
function pickStream(state, number) {
  if (state.part.number === number) return;
  state.change({ stream: number ? number + 1 : null, token: null, turn: null });
  takeStream(state, number);
  drawEpisode(state);
}

function missing(root, text) {
  add(root, [
    make("h1", { tabindex: "-1", text: "Nothing here" }),
    make("p.none", { text }),
    make("p", make("a", { href: "#/episodes", text: "All episodes" })),
  ]);
  return { title: "Nothing here" };
}

/* The episodes before and after in the table, as it was last filtered and sorted. */
function neighbours({ run, place }) {
  const list =
    app.list && app.list.run === run.number && app.list.places.includes(place)
      ? app.list.places
      : [...Array(run.size).keys()];
  const at = list.indexOf(place);
  return { before: list[at - 1], after: list[at + 1], at, size: list.length };
}

function episodeHead(state) {
  const { run, place } = state;
  const { columns } = run;
  const { before, after, at, size } = neighbours(state);
  const group = groupOf(run, columns.phase[place], columns.way[place], columns.group[place]);
  const samples = group.length > 1 ? `: ${group.length} samples` : "";
  const crumbs = [
    make("a", { href: listHref(run), text: "Episodes" }),
    make("span", { text: `${count(at + 1)} of ${count(size)}` }),
    make("a", { href: groupLink(run.number, columns, place), text: `group ${columns.group[place]}${samples}` }),
  ];
  const to = (target) =>
    target !== undefined && episodeLink(run.number, columns.id[target], { color: state.query.color });
  const steps = [stepLink(to(before), "←", "previous episode"), stepLink(to(after), "→", "next episode")];
  return viewHead(crumbs, visible(columns.id[place]), verdict(run, place), steps);
}

function listHref(run) {
  const list = app.list && app.list.run === run.number ? app.list.query : {};
  return link(["episodes"], runQuery(run.number, list));
}

/* The most important figures: [[name, value, tone]]. */
function verdict(run, place) {
  const { columns } = run;
  return [
    ["reward", reward(columns.reward[place]), rewardTone(columns.reward[place], columns, [place])],
    ["advantage", signed(columns.advantage[place])],
    ["end", spaced(columns.end_reason[place]), endTone(columns.end_reason[place])],
    columns.fate[place] && ["fate", visible(columns.fate[place])],
    columns.label[place] && ["label", visible(columns.label[place])],
    ["turns", count(columns.num_turns[place])],
    columns.num_streams[place] > 1 && ["streams", count(columns.num_streams[place])],
    ["tokens", `${count(columns.num_model_tokens[place])} of ${count(columns.num_tokens[place])}`],
    isNumber(columns.max_gap[place]) && ["largest gap", figure(columns.max_gap[place])],
  ];
}

function drawEpisode(state) {
  const { color } = state.query;
  state.view = color ? "tokens" : "conversation";
  drawTools(state);
  clear(state.side);
  if (color) {
    state.tokens = tokenView(state);
    clear(state.box).append(state.tokens.node);
  } else clear(state.box).append(conversation(state.run, state.episode, state.streams, (part) => state.href({ token: null, ...part })));
  if (state.streams.length > 1) state.side.prepend(streamTree(state));
  state.side.append(sideFacts(state));
  if (state.strip) state.strip.draw();
}

function drawTools(state) {
  const { color } = state.query;
  const views = choice(
    "view",
    [
      ["", "Conversation"],
      ["tokens", "Tokens"],
    ],
    color ? "tokens" : "",
    (value) => setColor(state, value ? state.lastColor || "mask" : null),
  );
  const colors =
    color &&
    choice(
      "colour of tokens",
      [
        ["mask", "mask", "1"],
        ["probability", "probability", "2"],
        ["gap", "gap", "3"],
      ],
      color,
      (value) => setColor(state, value),
    );
  add(clear(state.tools), [views, colors, color && legend(state)]);
}

/* Changes the colours; the tokens that are already drawn stay. */
function setColor(state, color) {
  const isSameView = Boolean(color) === (state.view === "tokens");
  state.lastColor = color || state.query.color;
  state.change({ color });
  if (!state.episode) return;
  if (!isSameView) drawEpisode(state);
  else if (color) {
    drawTools(state);
    state.tokens.recolor(color);
    state.strip.draw();
  }
}

/* Shows a turn; one that is asked for while the episode is still read is shown once it is there. */
function showTurn(state, number, isMoved = true) {
  const turns = state.episode && (state.episode.turns || []);
  const size = turns ? turns.length : state.run.columns.num_turns[state.place] || 0;
  if (!size) return;
  const turn = Math.max(1, Math.min(size, number || 1));
  if (turns) pickStream(state, turns[turn - 1].stream || 0);
  if (isMoved || !state.query.turn) state.change({ turn });
  if (!turns) return;
  if (state.view === "tokens") state.tokens.showToken(turns[turn - 1].start, false);
  const node = state.box.querySelector(`[data-turn="${turn}"]`);
  for (const each of state.box.querySelectorAll(".is-current")) each.classList.remove("is-current");
  if (!node) return;
  node.classList.add("is-current");
  node.scrollIntoView({
    block: "start",
    behavior: isMoved && !matchMedia("(prefers-reduced-motion: reduce)").matches ? "smooth" : "auto",
  });
}

function sideFacts({ run, episode, stream, part }) {
  const turns = episode.turns || [],
    versions = [...new Set(turns.flatMap((turn) => (turn.versions || []).map(([version]) => version)))];
  const facts = [
    ["phase", playedFor(episode.phase, episode.way)],
    ["step", count(episode.step)],
    ["sample", `${count(episode.sample_index)} of group ${count(episode.group)}`],
    episode.attempt > 0 && ["attempt", count(episode.attempt + 1)],
    ["problem", visible(episode.sample_id ?? NONE)],
    ["environment", visible(`${episode.env} ${episode.env_version}`)],
    versions.length > 0 && ["weights", versions.map((version) => `v${version}`).join(" ")],
    ["prompt", plural(part.record.prompt_length, "token")],
    ["seed", visible(asText(episode.seed))],
    ["time", seconds(episode.total_s)],
    ["engine", seconds(episode.engine_s)],
    ["env. time", seconds(episode.env_s)],
    scoreOf(episode)
      ? ["KL (k3)", figure(k3(stream))]
      : ["trainer", episode.score ? "log-probs of other tokens" : "no log-probs"],
    isNumber(episode.began) && ["began", new Date(episode.began * 1000).toISOString().slice(0, 19).replace("T", " ")],
  ];
  const box = make("section.side-facts", make("h2", { text: "Facts" }), factList(facts));
  const rewards = Object.entries(episode.rewards || {});
  if (rewards.length)
    box.append(
      make("h2", { text: "Rewards" }),
      factList(rewards.map(([name, value]) => [visible(name.slice(0, 80)), reward(value)])),
    );
  for (const [judge, text] of Object.entries(episode.verdicts || {}))
    box.append(
      make("h2", { text: `Verdict of ${visible(judge.slice(0, 80))}` }),
      textBlock(asText(text)),
    );
  const metadata = Object.entries(episode.metadata || {});
  if (metadata.length)
    box.append(
      make("h2", { text: "Metadata" }),
      factList(metadata.map(([name, value]) => [visible(name.slice(0, 80)), visible(asText(value).slice(0, 400))])),
    );
  return box;
}

function factList(facts) {
  return make(
    "dl.fact-list",
    facts
      .filter(Boolean)
      .map(([name, value]) =>
        make("div", make("dt", { text: name, dir: "auto" }), make("dd", { text: value, dir: "auto" })),
      ),
  );
}

/* mean(rho - 1 - log rho) with log rho = trainer - rollout. */
function k3(stream) {
  const values = [];
  for (let t = 0; t < stream.length; t += 1) {
    const d = stream.train[t] - stream.rollout[t];
    if (Number.isFinite(d)) values.push(Math.expm1(d) - d);
  }
  return mean(values);
}

/* Reads the episode again when its outcome or its score has been recorded. */
function updateEpisode(state) {
  const { run, place } = state;
  if (!state.episode || (state.episode.outcome && state.episode.score)) return;
  const isKnown =
    (run.columns.fate[place] && !state.episode.outcome) || (isNumber(run.columns.kl[place]) && !state.episode.score);
  if (!isKnown) return;
  app.source
    .episode(run.number, place)
    .then((episode) => {
      takeEpisode(state, episode);
      add(clear(document.querySelector(".verdict")), factBoxes(verdict(run, place)));
      const { scrollY } = window;
      drawEpisode(state);
      if (state.tokens && numberOf(state.query.token) !== null) state.tokens.showToken(Number(state.query.token), true);
      scrollTo(0, scrollY);
    })
    .catch(() => undefined);
}

function episodeKeys(state) {
  const { run } = state;
  const move = (name) => () => {
    const target = neighbours(state)[name];
    if (target !== undefined) goTo(episodeLink(run.number, run.columns.id[target], { color: state.query.color }));
  };
  const turn = (change) => () => showTurn(state, (Number(state.query.turn) || 0) + change);
  const keys = {
    j: move("after"),
    k: move("before"),
    "]": turn(1),
    "[": turn(-1),
    g: () => goTo(groupLink(run.number, run.columns, state.place)),
    Escape: () => goTo(listHref(run)),
    v: () => setColor(state, state.query.color ? null : state.lastColor || "mask"),
  };
  for (const [key, color] of Object.entries(COLORS)) keys[key] = () => setColor(state, color);
  return keys;
}
