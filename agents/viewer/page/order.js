/* Filters and sorts episodes. A place is the index of an episode in the columns of its run. */

const CHOICES = { env: "env", phase: "phase", way: "way", end: "end_reason", fate: "fate" };
const RANGES = { step: ["from", "to"], reward: ["min", "max"] };
const FIRST_ORDER = "";

/* Places of the episodes that match a query, in its order. */
function chosenPlaces(run, query) {
  return sorted(run, filtered(run, query), query.sort || FIRST_ORDER);
}

function filtered(run, query) {
  const tests = testsOf(run, query);
  const places = [];
  for (let place = 0; place < run.size; place += 1) if (tests.every((test) => test(place))) places.push(place);
  return places;
}

function testsOf(run, query) {
  const tests = [],
    { columns } = run;
  for (const [word, name] of Object.entries(CHOICES)) {
    if (word in query) tests.push((place) => String(columns[name][place] ?? "") === query[word]);
  }
  for (const [name, [low, high]] of Object.entries(RANGES)) {
    const least = numberOf(query[low]),
      most = numberOf(query[high]);
    if (least !== null) tests.push((place) => isNumber(columns[name][place]) && columns[name][place] >= least - 1e-9);
    if (most !== null) tests.push((place) => isNumber(columns[name][place]) && columns[name][place] <= most + 1e-9);
  }
  if (query.errors === "tool") tests.push((place) => columns.num_tool_errors[place] > 0);
  if (query.errors === "any") tests.push((place) => columns.error[place] !== "");
  const words = (query.q || "").toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length)
    tests.push((place) => {
      const text = haystack(run, place);
      return words.every((word) => text.includes(word));
    });
  return tests;
}

function numberOf(text) {
  return text === undefined || text === "" || !Number.isFinite(Number(text)) ? null : Number(text);
}

/* "-reward" sorts in descending order. Episodes without a value come last; equal ones keep the recorded order. */
function sorted(run, places, order) {
  const isDown = order.startsWith("-");
  const column = run.columns[isDown ? order.slice(1) : order];
  if (!column) return places;
  const sign = isDown ? -1 : 1;
  const isMissing = (value) => value === null || value === undefined || value === "";
  return places.sort((a, b) => {
    const x = column[a],
      y = column[b];
    if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y) || a - b;
    return x < y ? -sign : x > y ? sign : a - b;
  });
}
