/* The table of episodes with its filters; the address holds all of them. */

function showEpisodes(root, { query }) {
  const run = runOf(query);
  const state = { query: { ...query }, table: null, places: [] };
  delete state.query.run;
  const parts = {
    bar: make(".filters", { role: "search", "aria-label": "filter episodes" }),
    status: make("span", { role: "status" }),
    shown: make(".shown"),
    box: make(".table-box"),
  };
  const heading = make("h1.sr-only", { tabindex: "-1", text: "Episodes" });
  add(root, [heading, make(".filter-line", parts.bar, parts.shown), parts.box]);
  const update = (isKept) => {
    state.places = chosenPlaces(run, state.query);
    const all = plural(run.size, "episode");
    parts.status.textContent = state.places.length === run.size ? all : `${count(state.places.length)} of ${all}`;
    setPlaces(state.table, state.places, isKept);
    app.list = {
      run: run.number,
      query: { ...state.query },
      places: state.places,
      scrollTop: state.table.node.scrollTop,
      selected: state.table.places[state.table.at],
    };
    parts.box.classList.toggle("is-empty", !state.places.length);
  };
  const build = () => {
    state.table = makeTable(episodeColumns(run), {
      label: "episodes",
      order: state.query.sort || "",
      onSort: (sort) => change({ sort }),
    });
    clear(parts.box).append(state.table.node, make("p.none", { text: "No episode matches these filters." }));
  };
  const change = (part) => {
    if (!root.contains(parts.bar)) return; // typed just before another view was opened
    Object.assign(state.query, part);
    for (const [name, value] of Object.entries(state.query))
      if (value === "" || value === null) delete state.query[name];
    setAddress(link(["episodes"], runQuery(run.number, state.query)));
    filters.reset.classList.toggle("is-idle", !Object.keys(state.query).length);
    if ("sort" in part) build();
    update(false);
  };
  const filters = filterBar(parts.bar, run, state.query, change);
  parts.shown.append(filters.reset, parts.status);
  build();
  update(false);
  restore(state.table, run, state.query);
  return {
    title: "Episodes",
    update: () => {
      filters.recount();
      update(true);
    },
    leave: () => {
      app.list.scrollTop = state.table.node.scrollTop;
      app.list.selected = state.places[state.table.at];
    },
    keys: { ...rowKeys(state), ...episodeRowKeys(run, state), "/": () => filters.search.focus() },
    arrows: true,
  };
}

function episodeRowKeys(run, state) {
  const { number, columns } = run;
  const withRow = (action) => () => state.table.at >= 0 && action(state.places[state.table.at]);
  return {
    Enter: withRow((place) => goTo(episodeLink(number, columns.id[place]))),
    g: withRow((place) => goTo(groupLink(number, columns, place))),
  };
}

/* Restores selection and scroll position of the table after a visit to another view. */
function restore(table, run, query) {
  const { left } = app;
  if (!left || left.run !== run.number || JSON.stringify(left.query) !== JSON.stringify(query)) return;
  table.at = left.selected === undefined ? -1 : table.places.indexOf(left.selected);
  table.node.scrollTop = left.scrollTop;
  if (table.at >= 0) showRow(table, table.at);
  drawRows(table);
}

function filterBar(bar, run, query, change) {
  const search = make("input.search", {
    type: "search",
    placeholder: "search id, question, answer, label",
    "aria-label": "search text",
    value: query.q || "",
  });
  search.addEventListener(
    "input",
    debounce(120, () => change({ q: search.value })),
  );
  const menus = [
    menu(run, query, change, "env", "environment"),
    menu(run, query, change, "phase", "phase"),
    menu(run, query, change, "way", "way"),
    menu(run, query, change, "end", "end"),
    menu(run, query, change, "fate", "fate"),
  ];
  const step = range("step", query, ["from", "to"], change),
    worth = range("reward", query, ["min", "max"], change);
  const errors = select(
    "errors",
    [
      ["", "errors: all"],
      ["tool", "with tool errors"],
      ["any", "with an error"],
    ],
    query.errors || "",
    (value) => change({ errors: value }),
  );
  const reset = button("clear", () => goTo(link(["episodes"], runQuery(run.number, {}))), { class: "quiet" });
  add(bar, [search, menus.map((each) => each.node), step, worth, errors]);
  if (Object.keys(query).length === 0) reset.classList.add("is-idle");
  return { search, reset, recount: () => menus.forEach((each) => each.recount()) };
}

/* A menu of the values of a column, each with its number of episodes. */
function menu(run, query, change, word, label) {
  const node = select(label, [], "", (value) => change({ [word]: value === "any" ? "" : value.slice(1) }));
  const recount = () => {
    if (document.activeElement === node && node.options.length) return;
    const found = run.size ? tally(run, CHOICES[word]).filter(([value]) => value !== "") : [];
    const values = found.map(([value]) => String(value));
    if (query[word] && !values.includes(query[word])) found.push([query[word], 0]);
    clear(node).append(
      ...[
        make("option", { value: "any", text: `${label}: all` }),
        ...found.map(([value, times]) =>
          make("option", { value: `=${value}`, text: `${visible(value)} (${count(times)})` }),
        ),
      ],
    );
    node.value = word in query ? `=${query[word]}` : "any";
    node.hidden = found.length < 2 && !(word in query);
  };
  recount();
  return { node, recount };
}

function range(label, query, [low, high], change) {
  const field = (name, word) => {
    const input = make("input.number", {
      type: "number",
      step: "any",
      placeholder: word,
      "aria-label": `${label} ${word}`,
      value: query[name] ?? "",
    });
    input.addEventListener(
      "input",
      debounce(120, () => change({ [name]: input.value })),
    );
    return input;
  };
  return make(
    "span.range",
    { role: "group", "aria-label": label },
    make("span", { text: label }),
    field(low, "from"),
    make("span", { text: "–" }),
    field(high, "to"),
  );
}

function episodeColumns(run) {
  const { columns } = run;
  const calls = (value, place) => {
    const errors = columns.num_tool_errors[place];
    return errors ? `${value} (${errors}!)` : value ? count(value) : NONE;
  };
  return [
    { name: "image", title: "", kind: "thumb", fill: (cell, place, row) => thumbnail(run, cell, place, row) },
    { name: "id", title: "episode", kind: "id", fill: (cell, place) => fillId(run, cell, place) },
    { ...figureColumn(columns, "reward", "reward", reward), toneOf: (place) => rewardTone(columns.reward[place], columns, [place]) },
    {
      ...figureColumn(columns, "end_reason", "end", (value) => spaced(value || NONE)),
      kind: "end",
      toneOf: (place) => endTone(columns.end_reason[place]),
    },
    figureColumn(columns, "step", "step", count, "the training step during which it ended"),
    textColumn(columns, "question", "question"),
    textColumn(columns, "answer", "end of the answer"),
    { ...textColumn(columns, "label", "label"), kind: "label" },
    figureColumn(columns, "advantage", "adv.", signed, "advantage"),
    figureColumn(columns, "num_turns", "turns", count),
    Math.max(...columns.num_streams) > 1 && figureColumn(columns, "num_streams", "streams", count, "token streams"),
    figureColumn(columns, "num_tokens", "tokens", count, "tokens of all streams"),
    figureColumn(columns, "num_tool_calls", "calls", calls, "tool calls, and those that went wrong"),
    figureColumn(columns, "max_gap", "max gap", figure, "largest |rollout - trainer| log-prob of a token, in nats"),
    figureColumn(columns, "total_s", "time", seconds, "wall time of the episode"),
  ].filter(Boolean);
}

function figureColumn(columns, name, title, say, hint) {
  const fill = (cell, place) => {
    cell.textContent = say(columns[name][place], place);
  };
  return { name, title, kind: "figure", hint, fill };
}

function textColumn(columns, name, title) {
  const fill = (cell, place) => {
    cell.textContent = visible(columns[name][place] ?? "").replace(/\s+/g, " ");
    cell.dir = "auto";
  };
  return { name, title, kind: "long", fill };
}

/* The tone of a reward, or of the mean reward of several episodes: high where all are a success. */
function rewardTone(value, { success } = {}, places = []) {
  if (!isNumber(value)) return "none";
  if (places.length && places.every((place) => success[place])) return "high";
  return value <= 0 ? "low" : "mid";
}

function thumbnail(run, cell, place, row) {
  const name = run.columns.image[place];
  clear(cell);
  if (name) row.waiting = { cell, make: () => imageOf(run.number, name, "") };
}

function fillId(run, cell, place) {
  const id = run.columns.id[place];
  const anchor = make("a.row-link", { href: episodeLink(run.number, id) }, make("bdi", { text: visible(id) }));
  const fate = run.columns.fate[place];
  clear(cell).append(anchor);
  if (fate && fate !== "train") cell.append(make("span.sub", { text: visible(fate) }));
}
