/* An episode as a conversation: the problem and the first observation, then for each turn the model's text, its tool
   calls and their answers; before the first turn of a later stream, what left the history. */

function conversation(run, episode, streams, hrefOf) {
  const begun = new Map(streams.slice(1).map((stream) => [stream.turns[0][0], stream]));
  const box = make(
    ".conversation",
    openingOf(episode).map((message) => messageBox(run, message)),
  );
  (episode.turns || []).forEach((turn, k) => {
    const stream = begun.get(k + 1);
    if (stream) box.append(branchBox(run, stream, hrefOf({ stream: stream.number + 1, color: "mask" })));
    box.append(turnBox(run, episode, k + 1, hrefOf({ turn: k + 1 })));
  });
  if (episode.error)
    box.append(
      make("section.message.error", make(".role", { text: "error" }), textBlock(String(episode.error), "pre")),
    );
  return box;
}

/* The messages before the first turn: the problem, then the first observation. */
function openingOf(episode) {
  return (episode.messages || []).slice(0, episode.num_opening);
}

function firstObservation(episode) {
  return openingOf(episode).slice(episode.num_prompt_messages);
}

function turnBox(run, episode, number, href) {
  const turn = episode.turns[number - 1],
    info = turn.info || {},
    calls = Array.isArray(info.tool_calls) ? info.tool_calls : [];
  const rest = Object.entries(info).filter(([name]) => name !== "tool_calls");
  const head = make(
    ".turn-head",
    make("a", { href, text: `Turn ${number}` }),
    make(".turn-facts", turnRewards(episode, number), turnFacts(turn)),
    forkBox(run, episode, number),
  );
  const written = make(
    ".message.model",
    make(".role", { text: "model" }),
    turn.text ? writtenParts(turn) : make("p.none", { text: "no text" }),
  );
  return make(
    "section.turn",
    { data: { turn: number }, tabindex: "-1", "aria-label": `turn ${number}` },
    head,
    written,
    calls.map(callBox),
    (turn.observations || []).map((message) => messageBox(run, message)),
    rest.length > 0 && infoLine(rest),
  );
}

/* What the model wrote; its thoughts are folded. */
function writtenParts(turn) {
  const parts = turn.parts || [[false, turn.text]];
  const nodes = parts.map(([isThought, text]) => (isThought ? thoughtBox(text) : textBlock(text)));
  return [nodes, parts.every(([isThought]) => isThought) && make("p.none", { text: "nothing said" })];
}

function thoughtBox(text) {
  const length = plural(text.length, "character");
  return make("details.thought", make("summary", { text: `thinking, ${length}` }), textBlock(text));
}

/* What the recording says of a turn's reward: the environment's for the turn and the sum so far, the score of a tool,
   and at the last turn the reward of the episode. */
function turnRewards(episode, number) {
  const { reward: ofTurn, tool_score: ofTool } = episode.turns[number - 1].info || {};
  const soFar = episode.turns.slice(0, number).reduce((sum, turn) => sum + (turn.reward || 0), 0);
  const hasTurnRewards = episode.turns.some((turn) => turn.reward);
  const ofEpisode = number === episode.turns.length ? episode.reward : null;
  return [
    ["reward", ofTurn],
    ["so far", number > 1 && hasTurnRewards ? soFar : null],
    ["tool score", ofTool],
    ["episode's reward", ofEpisode],
  ]
    .filter(([, value]) => isNumber(value))
    .map(([name, value]) => make("span", { text: `${name} ${reward(value)}`, data: { tone: rewardTone(value) } }));
}

function turnFacts(turn) {
  const versions = (turn.versions || [])
    .map(([version, tokens], k, all) => (all.length > 1 ? `v${version}×${tokens}` : `v${version}`))
    .join(" ");
  const facts = [
    plural(turn.usage?.completion_tokens ?? turn.end - turn.start, "token"),
    turn.num_cached ? `${count(turn.num_cached)} cached` : null,
    versions && `weights ${versions}`,
    `engine ${seconds(turn.engine_s)}`,
    `environment ${seconds(turn.env_s)}`,
    turn.stream && `stream ${turn.stream + 1}`,
  ];
  const marks = [
    turn.finish !== "stop" &&
      make("span.badge.tone-limit", { text: visible(turn.finish), title: "why the model stopped" }),
    turn.done && make("span.badge.tone-good", { text: "done", title: "the environment says that the task has ended" }),
  ];
  return [facts.filter(Boolean).map((text) => make("span", { text })), marks];
}

/* A tool call as the environment parsed it, with its outcome. */
function callBox(call) {
  const outcome = call && typeof call === "object" ? call.outcome : undefined;
  const name = call && call.name !== undefined && call.name !== null ? asText(call.name) : "call";
  const box = make(".call", make("span.call-name", { dir: "auto", text: visible(name.slice(0, 200)) }));
  const given = call && call.arguments;
  if (given && typeof given === "object" && !Array.isArray(given))
    box.append(
      make(
        "dl",
        Object.entries(given).map(([key, value]) =>
          make(
            "div",
            make("dt", { dir: "auto", text: visible(key.slice(0, 200)) }),
            make("dd", textBlock(asText(value), "span")),
          ),
        ),
      ),
    );
  else if (given !== undefined && given !== null) box.append(textBlock(asText(given), "span"));
  if (outcome !== undefined)
    box.append(
      make(`span.badge.tone-${outcome === "ok" ? "good" : "fault"}`, { text: spaced(asText(outcome).slice(0, 300)) }),
    );
  return box;
}

function infoLine(rest) {
  return make(
    ".info",
    rest.map(([name, value]) =>
      make(
        "span",
        make("span.name", { dir: "auto", text: visible(name.slice(0, 200)) }),
        textBlock(asText(value), "span"),
      ),
    ),
  );
}

/* A message of the problem or of the environment. */
function messageBox(run, message) {
  const role = visible(asText(message.role ?? "message").slice(0, 40));
  const known = ["system", "user", "tool", "assistant"].includes(role) ? role : "other";
  const name = message.name ? ` · ${visible(asText(message.name).slice(0, 80))}` : "";
  return make(
    `.message.${known}`,
    make(".role", { text: role + name, dir: "auto" }),
    contentParts(run, message.content),
  );
}

function contentParts(run, content) {
  if (typeof content === "string") return textBlock(content);
  if (!Array.isArray(content))
    return content === null || content === undefined
      ? make("p.none", { text: "empty" })
      : textBlock(asText(content), "pre");
  return content.map((part) => {
    if (part && part.type === "image" && typeof part.image === "string")
      return imageButton(run.number, part.image, "image of the message");
    if (part && part.type === "text" && typeof part.text === "string") return textBlock(part.text);
    return textBlock(asText(part), "pre");
  });
}
