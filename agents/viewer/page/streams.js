/* The token streams of an episode: the turns, messages and log-probs of each, and the stream that it branches from. */

const MOST_BEFORE = 16;

/* [{number, record, turns: [[number, turn]], messages, opening, train, origin, left}]. A later stream continues an
   earlier one, its origin, without the messages `left`; null where it shares no message with one. */
function streamsOf(episode) {
  const said = [...(episode.messages || []), ...(episode.later_messages || [])];
  const score = scoreOf(episode);
  let scored = 0;
  const streams = recordsOf(episode).map((record, number) => {
    const from = scored;
    scored += (record.logprobs || []).length;
    return {
      number,
      record,
      turns: [],
      messages: number ? record.said.map((place) => said[place]) : episode.messages || [],
      opening: number ? record.num_opening : episode.num_opening,
      train: score && score.logprobs.slice(from, scored),
      origin: null,
      left: [],
    };
  });
  (episode.turns || []).forEach((turn, k) => streams[turn.stream || 0].turns.push([k + 1, turn]));
  for (const stream of streams.slice(1)) findOrigin(stream, streams);
  return streams;
}

function recordsOf(episode) {
  return [episode, ...(episode.later || [])];
}

/* The origin is the earlier stream that shares most messages, and the latest of these. */
function findOrigin(stream, streams) {
  const own = new Set(stream.messages);
  const [begins] = stream.turns[0];
  let most = 1;
  for (const other of streams.slice(Math.max(0, stream.number - MOST_BEFORE), stream.number)) {
    const before = saidBefore(other, begins);
    const left = before.filter((message) => !own.has(message));
    if (before.length - left.length < most) continue;
    most = before.length - left.length;
    Object.assign(stream, { origin: other, left });
  }
}

/* The messages of a stream before a turn of the episode: an earlier stream may go on after a later one began. */
function saidBefore({ messages, opening, turns }, number) {
  let coming = turns.filter(([own]) => own < number).length;
  const end = messages.findIndex((message, k) => k >= opening && message.role === "assistant" && coming-- === 0);
  return end < 0 ? messages : messages.slice(0, end);
}

function imagesIn(messages) {
  const parts = messages.flatMap((message) => (Array.isArray(message.content) ? message.content : []));
  return parts.filter((part) => part && part.type === "image").map((part) => part.image);
}

/* Where a later stream comes from, in words. */
function originText({ origin, left }) {
  if (!origin) return "begins anew";
  const images = imagesIn(left).length;
  const gone = [left.length && plural(left.length, "message"), images && plural(images, "image")].filter(Boolean);
  return `from stream ${origin.number + 1}${gone.length ? `, without ${gone.join(" and ")} of it` : ""}`;
}

/* Stands before the turn that begins a later stream, with the messages that left the history. */
function branchBox(run, stream, href) {
  return make(
    "section.branch",
    make("a", { href, text: `Stream ${stream.number + 1}` }),
    ` ${originText(stream)}`,
    stream.left.length > 0 &&
      make(
        "details",
        make("summary", { text: "what left the history" }),
        stream.left.map((message) => messageBox(run, message)),
      ),
  );
}

/* All streams as a tree, each indented below its origin; a click picks one. */
function streamTree(state) {
  const depths = [];
  const items = state.streams.map((stream) => {
    depths.push(stream.origin ? depths[stream.origin.number] + 1 : 0);
    const depth = depths[stream.number];
    const numbers = stream.turns.map(([number]) => number);
    const turns = numbers.length > 1 ? `turns ${numbers[0]} to ${numbers.at(-1)}` : `turn ${numbers[0] ?? NONE}`;
    const pick = button(`stream ${stream.number + 1}`, () => pickStream(state, stream.number), {
      "aria-pressed": String(stream === state.part),
    });
    const from = stream.number > 0 && make("span.hint", { text: originText(stream) });
    const item = make("li", pick, make("span", { text: turns }), from);
    // A window moves on turn after turn, so that each stream is one level deeper.
    item.style.marginLeft = `${12 * Math.min(depth, 8)}px`;
    return item;
  });
  return make("section.stream-tree", make("h2", { text: "Streams" }), make("ol", items));
}
