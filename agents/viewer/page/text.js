/* Puts text of models and tools into the page as it is; invisible characters are shown by name. */

const PIECE = 20000;
const MOST_MARKS = 300;
/* As in envs/safe_text.py, which says why; tab and line break stay. */
const INVISIBLE = String.raw`\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb`;
const FOREIGN = String.raw`[^\u0000-\u007f\u200c\u200d]`;
const JOINERS = String.raw`(?<!${FOREIGN})[\u200c\u200d]|[\u200c\u200d](?!${FOREIGN})`;
const SELECTORS = String.raw`(?<=[\ufe00-\ufe0f])[\ufe00-\ufe0f]+`;
const SIGNS = String.raw`\ud82f[\udca0-\udca3]|\ud834[\udd73-\udd7a]`;
const LONE_SURROGATES = String.raw`[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]`;
/* Tag characters and variation selectors are invisible, so text can be hidden in them. */
const TAGS = String.raw`(?:[\udb40-\udb43][\udc00-\udfff])+`;
const HIDDEN = new RegExp(`[${INVISIBLE}]+|${JOINERS}|${SELECTORS}|${SIGNS}|${TAGS}|${LONE_SURROGATES}`, "g");
const NAMES = {
  "\u0000": "NUL",
  "\u0008": "BS",
  "\u000b": "VT",
  "\u000c": "FF",
  "\r": "CR",
  "\u001b": "ESC",
  "\u007f": "DEL",
  "\u00ad": "SHY",
  "\u061c": "ALM",
  "\u200b": "ZWSP",
  "\u200e": "LRM",
  "\u200f": "RLM",
  "\u2028": "LS",
  "\u2029": "PS",
  "\u202a": "LRE",
  "\u202b": "RLE",
  "\u202c": "PDF",
  "\u202d": "LRO",
  "\u202e": "RLO",
  "\u2066": "LRI",
  "\u2067": "RLI",
  "\u2068": "FSI",
  "\u2069": "PDI",
  "\ufeff": "BOM",
};

function hex(character) {
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/* "RLO" for a right-to-left override, "U+0001" for a character without a name; a long run is cut, with its length. */
function hiddenName(run) {
  const all = Array.from(run);
  const names = all.slice(0, 6).map((each) => NAMES[each] || hex(each));
  return names.join(" ") + (all.length > 6 ? ` … ${count(all.length)} in all` : "");
}

/* Text for a title, a tip or a cell, with names in place of invisible characters. */
function visible(text) {
  return String(text).replace(HIDDEN, (run) => `⟨${hiddenName(run)}⟩`);
}

/* Adds text to an element with a mark for each invisible run; after many marks, names are part of the text. */
function appendVisible(node, text) {
  let from = 0,
    marks = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if ((marks += 1) > MOST_MARKS) {
      node.append(visible(text.slice(from)));
      return node;
    }
    if (match.index > from) node.append(text.slice(from, match.index));
    node.append(make("span.hidden-char", { text: hiddenName(match[0]), title: "an invisible character" }));
    from = match.index + match[0].length;
  }
  if (from < text.length) node.append(from ? text.slice(from) : text);
  return node;
}

/* A block of text; a long one shows its beginning, and a button draws the rest in pieces. */
function textBlock(text, selector = "div") {
  const node = make(`${selector}.text`, { dir: "auto" });
  const end = pieceEnd(text, 0);
  appendWritten(node, text.slice(0, end));
  if (end >= text.length) return node;
  const more = button(`show all ${count(text.length)} characters`, () => drawRest(node, text, end, more), {
    class: "more",
  });
  return make(".text-long", node, more);
}

function drawRest(node, text, from, more) {
  if (from >= text.length || !more.isConnected) {
    more.remove();
    return;
  }
  const end = pieceEnd(text, from);
  appendWritten(node.appendChild(make("span.text-piece")), text.slice(from, end));
  more.textContent = `${count(end)} of ${count(text.length)} characters`;
  more.disabled = true;
  requestAnimationFrame(() => drawRest(node, text, end, more));
}

/* A piece ends at a line break, else at a space, and never inside a character. */
function pieceEnd(text, from) {
  const end = from + PIECE;
  if (end >= text.length) return text.length;
  for (const mark of ["\n", " "]) {
    const found = text.lastIndexOf(mark, end - 1);
    if (found > end - PIECE / 10) return found + 1;
  }
  return /[\ud800-\udbff]/.test(text[end - 1]) ? end - 1 : end;
}

/* Adds text exactly as the model wrote it; tool calls in it are highlighted. */
function appendWritten(node, text) {
  const open = "<tool_call>",
    close = "</tool_call>";
  let from = 0;
  for (let drawn = 0; drawn < 200; drawn += 1) {
    const start = text.indexOf(open, from);
    if (start < 0) break;
    const found = text.indexOf(close, start);
    const end = found < 0 ? text.length : found + close.length;
    appendVisible(node, text.slice(from, start));
    node.append(appendVisible(make("span.written-call"), text.slice(start, end)));
    from = end;
  }
  return appendVisible(node, text.slice(from));
}

/* One of the program's own names with spaces: "token budget" for "token_budget". */
function spaced(text) {
  return /^[a-z]+(_[a-z]+)*$/.test(text) ? text.replaceAll("_", " ") : visible(text);
}

/* A JSON value as text. */
function asText(value) {
  return typeof value === "string" ? value : (JSON.stringify(value, null, 1) ?? "");
}
