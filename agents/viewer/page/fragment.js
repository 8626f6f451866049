/* The fragment of the address holds the view's state: #/episode/train-12-3?turn=2&color=gap. */

function readFragment(hash) {
  const [path, query] = splitOnce(hash.replace(/^#\/?/, ""), "?");
  return {
    parts: path
      .split("/")
      .filter((part) => part !== "")
      .map(decoded),
    query: Object.fromEntries(
      (query || "")
        .split("&")
        .filter(Boolean)
        .map((pair) => splitOnce(pair, "=").map(decoded)),
    ),
  };
}

function splitOnce(text, mark) {
  const at = text.indexOf(mark);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function decoded(text) {
  try {
    return decodeURIComponent(text.replaceAll("+", " "));
  } catch {
    return text;
  }
}

/* encodeURIComponent throws on a lone surrogate. */
function encoded(text) {
  const whole = String(text).replace(new RegExp(LONE_SURROGATES, "g"), "\ufffd");
  return encodeURIComponent(whole).replaceAll("%20", "+");
}

/* link(["episode", "train-12-3"], {turn: 2}); null and empty values are left out. */
function link(parts, query) {
  const pairs = Object.entries(query || {}).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  const tail = pairs.map(([key, value]) => `${encoded(key)}=${encoded(value)}`).join("&");
  return `#/${parts.map(encoded).join("/")}${tail ? `?${tail}` : ""}`;
}

/* Changes the address without drawing the view again. */
function setAddress(hash) {
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

/* Shows another view before the next key is heard: hashchange alone would come only after it. */
function goTo(hash) {
  if (hash === location.hash) return;
  history.pushState(null, "", hash);
  showRoute();
}

/* Adds run=1 for the second run; the first one is the default. */
function runQuery(run, query) {
  return { ...query, run: run || null };
}

function episodeLink(run, id, query) {
  return link(["episode", id], runQuery(run, query));
}

function groupLink(run, columns, index, query) {
  return link(["group", columns.phase[index], columns.way[index], columns.group[index]], runQuery(run, query));
}
