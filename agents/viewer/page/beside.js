/* Episodes side by side, one per column; a beginning that is the same as in the reference is dimmed. */

const MOST_SAME = 600;
const MOST_TOKENS = 3000;

/* items: [{run, place, name}], null for a gap. `look` is {color, reference, isPaired}; no colour means texts.
   Each column is compared with the reference, else with the first of its pair, else with all columns to its left.
   Returns a node that fills itself; calls `changed` when a reference is chosen. */
function besideView(items, look, changed) {
  const box = make(`.beside${look.isPaired && items.length > 2 ? ".is-paired" : ""}`, {
    role: "group",
    "aria-label": "samples side by side",
  });
  Promise.all(items.map((item) => item && app.source.episode(item.run.number, item.place)))
    .then((episodes) => {
      const columns = episodes.map(
        (episode, k) => episode && { ...items[k], episode, stream: readStream(items[k].run, streamsOf(episode)[0]) },
      );
      columns.forEach((column, k) => {
        if (!column) box.append(make("p.beside-gap", { text: "no such sample" }));
        else
          box.append(
            besideColumn(column, othersOf(columns, k, look), look.color, k === look.reference, () =>
              changed({ ref: k === look.reference ? "" : k }),
            ),
          );
      });
    })
    .catch((error) =>
      box.append(make("p.none", { role: "alert", text: `These episodes could not be read: ${error.message}` })),
    );
  return box;
}

function othersOf(columns, k, { reference, isPaired }) {
  if (columns[reference]) return k === reference ? [] : [columns[reference]];
  return (isPaired ? columns.slice(k - (k % 2), k) : columns.slice(0, k)).filter(Boolean);
}

function besideColumn(column, others, color, isReference, onPick) {
  const { run, place, name, episode } = column,
    { columns } = run;
  const pick = button(isReference ? "reference" : "compare with this", onPick, {
    class: "quiet",
    "aria-pressed": String(isReference),
  });
  const head = make(
    "header",
    column.above &&
      make(`.beside-run`, make(`span.series-${run.number}`, { text: visible(column.above), dir: "auto" })),
    make(
      ".beside-title",
      make(
        "a",
        { href: episodeLink(run.number, episode.id, { color }), title: visible(episode.id) },
        make("bdi", { text: visible(name) }),
      ),
      pick,
    ),
    make(
      ".beside-figures",
      make("span.reward-chip", {
        text: reward(columns.reward[place]),
        data: { tone: rewardTone(columns.reward[place], columns, [place]) },
        title: "reward",
      }),
      isNumber(columns.advantage[place]) &&
        make("span", { text: signed(columns.advantage[place]), title: "advantage" }),
      make("span", { text: plural(columns.num_model_tokens[place], "token") }),
      make("span", { text: spaced(columns.end_reason[place]), data: { tone: endTone(columns.end_reason[place]) } }),
    ),
  );
  const body = color ? besideTokens(column, others, color) : besideTexts(column, others);
  const isSame = others.some((other) => sameStart(other.episode, episode));
  body.prepend(...firstObservation(episode).map((message) => saidBox(run, message, isSame)));
  return make(
    `section.beside-column${isReference ? ".is-reference" : ""}`,
    { "aria-label": visible(name) },
    head,
    body,
    episode.error && make(".message.error", textBlock(String(episode.error), "pre")),
  );
}

/* Draws turn by turn; the beginning that is the same as in another column is dimmed. */
function besideTexts({ run, episode }, others) {
  let same = others.map((other) => other.episode).filter((other) => sameStart(other, episode));
  return make(
    ".beside-body",
    (episode.turns || []).map((turn, k) => {
      same = same.filter((other) => (other.turns || [])[k]);
      const shared = Math.max(0, ...same.map((other) => commonPrefix(turn.text, other.turns[k].text)));
      same = same.filter((other) => turn.text === other.turns[k].text && sameObservations(turn, other.turns[k]));
      const said = (turn.observations || []).map((message) => saidBox(run, message, same.length > 0));
      return make(
        ".beside-turn",
        make("a.beside-label", { href: episodeLink(run.number, episode.id, { turn: k + 1 }), text: `turn ${k + 1}` }),
        dimmedText(turn.text, shared),
        said,
      );
    }),
    !(episode.turns || []).length && make("p.none", { text: "no turn" }),
  );
}

/* What the environment said to the model. */
function saidBox(run, message, isSame) {
  return make(`.beside-said${isSame ? ".is-same" : ""}`, contentParts(run, message.content));
}

function sameStart(episode, other) {
  return JSON.stringify(firstObservation(episode)) === JSON.stringify(firstObservation(other));
}

function sameObservations(turn, other) {
  return JSON.stringify(turn.observations) === JSON.stringify(other.observations);
}

function dimmedText(text, shared) {
  if (!shared) return textBlock(text);
  const cut = shared > MOST_SAME ? shared - 80 : 0;
  const same = make("span.is-same", { title: "the same as in the reference" });
  if (cut) same.append(`… ${count(cut)} characters the same … `);
  appendWritten(same, text.slice(cut, shared));
  const block = textBlock(text.slice(shared));
  (block.classList.contains("text") ? block : block.firstChild).prepend(same);
  return block;
}

function commonPrefix(a, b) {
  const most = Math.min(a.length, b.length);
  let k = 0;
  while (k < most && a[k] === b[k]) k += 1;
  return k > 0 && /[\ud800-\udbff]/.test(a[k - 1]) ? k - 1 : k;
}

/* Draws the tokens after the prompt, and marks the first one that differs from all other columns. */
function besideTokens({ stream, episode }, others, color) {
  const start = episode.prompt_length || 0;
  const shared = Math.max(0, ...others.map((other) => sharedTokens(stream, start, other)));
  const flow = make(".flow.tokens", { dir: "ltr", data: { color } });
  const last = Math.min(stream.length, start + MOST_TOKENS);
  for (let t = start; t < last; t += 1) {
    const span = make("span", {
      class:
        tokenClass(stream, t) +
        (t - start < shared ? " is-same" : t - start === shared && others.length ? " is-fork" : ""),
      data: { t },
    });
    appendToken(span, stream.texts[t]);
    flow.append(span);
    if (stream.texts[t].includes("\n")) flow.append(make("br"));
  }
  tipOn(flow, (event) => {
    const found = event.target.closest("[data-t]");
    return found && tokenLines(stream, Number(found.dataset.t));
  });
  return make(
    ".beside-body",
    flow,
    last < stream.length &&
      make("p.hint", { text: `${count(stream.length - last)} more tokens are on the episode's own page` }),
    episode.later && make("p.hint", { text: "this is the first stream; the others are on the episode's own page" }),
  );
}

function sharedTokens(stream, start, other) {
  const from = other.episode.prompt_length || 0;
  let shared = 0;
  while (start + shared < stream.length && stream.ids[start + shared] === other.stream.ids[from + shared]) shared += 1;
  return shared;
}

/* Buttons that choose how columns are drawn; calls `changed` with the new choice. */
function besideTools(look, changed) {
  const left = look.isPaired ? "the first run's sample" : "a sample further left";
  const other = look.reference === null ? left : "the reference";
  return make(
    ".episode-tools",
    choice(
      "drawn as",
      [
        ["text", "Text"],
        ["mask", "Tokens", "1"],
        ["probability", "Probability", "2"],
        ["gap", "Gap", "3"],
      ],
      look.color || "text",
      (picked) => changed(picked === "text" ? { color: "" } : { color: picked }),
    ),
    make("p.hint", { text: `dimmed: the same beginning as in ${other}` }),
  );
}
