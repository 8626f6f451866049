/* One run as the page knows it: columns of all episodes, and what is found by id, group or problem. */

/* Makes a run of its first overview. */
function makeRun(number, overview) {
  const run = { number };
  empty(run);
  takeOverview(run, overview);
  return run;
}

function empty(run) {
  Object.assign(run, {
    metrics: [],
    columns: {},
    size: 0,
    byId: new Map(),
    groups: new Map(),
    haystacks: [],
    tokens: new Map(),
    tokenBytes: new Map(),
  });
}

/* Takes in what an overview brings that is new; returns whether anything was. */
function takeOverview(run, overview) {
  const first = overview.first || 0,
    ids = (overview.columns || {}).id || [],
    rows = overview.metrics || [];
  if (!first && run.size) empty(run);
  const { name, env, manifest, folder, summary, cursor, live } = overview;
  const isNew = ids.length > 0 || rows.length > 0 || live !== run.live || Boolean(summary) !== Boolean(run.summary);
  Object.assign(run, {
    name: name || `run ${run.number}`,
    env: env || "",
    manifest: manifest || {},
    folder: folder || "",
    summary,
    cursor,
    live,
  });
  run.metrics = [...run.metrics.slice(0, overview.first_metric || 0), ...rows];
  takeColumns(run, overview.columns || {}, first, ids.length);
  for (const [id, text] of Object.entries(overview.tokens || {})) run.tokens.set(Number(id), text);
  for (const [id, digits] of Object.entries(overview.token_hex || {})) run.tokenBytes.set(Number(id), hexBytes(digits));
  return takeUpdates(run, overview.updates || {}) || isNew;
}

function takeColumns(run, columns, first, size) {
  for (const [name, values] of Object.entries(columns)) {
    const column = (run.columns[name] ||= []);
    for (let i = 0; i < values.length; i += 1) column[first + i] = values[i];
  }
  for (let place = first; place < first + size; place += 1) index(run, place);
  run.size = Math.max(run.size, first + size);
}

/* Values of earlier episodes that have become known. */
function takeUpdates(run, updates) {
  let isNew = false;
  for (const [name, values] of Object.entries(updates)) {
    for (const [place, value] of Object.entries(values)) {
      (run.columns[name] ||= [])[Number(place)] = value;
      run.haystacks[Number(place)] = undefined;
      isNew = true;
    }
  }
  return isNew;
}

function index(run, place) {
  const { id } = run.columns;
  run.byId.set(encoded(id[place]), place);
  run.haystacks[place] = undefined;
  const key = groupKey(run, place);
  const group = run.groups.get(key);
  if (group) group.push(place);
  else run.groups.set(key, [place]);
}

function groupKey(run, place) {
  const { phase, way, group } = run.columns;
  return `${encoded(phase[place])}/${encoded(way[place])}/${group[place]}`;
}

/* The episodes of a problem in order: sample by sample, earlier tries after the last one. */
function groupOf(run, phase, way, group) {
  const { sample_index: sample, attempt } = run.columns;
  const found = run.groups.get(`${encoded(phase)}/${encoded(way)}/${group}`) || [];
  return [...found].sort((a, b) => attempt[b] - attempt[a] || sample[a] - sample[b]);
}

function hexBytes(digits) {
  return Uint8Array.from(digits.match(/../g) || [], (pair) => parseInt(pair, 16));
}

/* What a text search looks through. */
function haystack(run, place) {
  const { id, question, answer, label, sample_id: sample } = run.columns;
  return (run.haystacks[place] ||= [id, sample, label, question, answer]
    .map((column) => column[place] ?? "")
    .join("\n")
    .toLowerCase());
}

function modelName(run) {
  const path = run.manifest.model || "";
  const parts = path.split("/").filter(Boolean);
  return parts.slice(/^[~/.]/.test(path) ? -2 : 0).join("/");
}

/* Distinct values of a column, most frequent first: [[value, count], ...]. */
function tally(run, name, places) {
  const counts = new Map();
  const column = run.columns[name];
  for (const place of places || column.keys()) counts.set(column[place], (counts.get(column[place]) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}
