/* The token view: all tokens coloured by mask, probability or gap, drawn in pieces; an image is folded to one box. */

const TOKENS_AT_ONCE = 1500;
const MOST_LISTED = 12;

/* Returns {node, recolor(color), showToken(t, isPicked)}; the side bar shows the picked token. */
function tokenView(state) {
  const { stream, query } = state;
  const node = make(`.tokens${stream.length > TOKENS_AT_ONCE ? ".is-long" : ""}`, {
    data: { color: query.color },
    role: "region",
    "aria-label": "tokens",
    tabindex: "0",
  });
  const view = {
    state,
    stream,
    node,
    pieces: piecesOf(stream),
    drawn: 0,
    spans: new Map(),
    picked: -1,
    detail: make("section.side-token", { "aria-live": "polite" }),
    list: make("section.side-list"),
  };
  const end = make(".tokens-end");
  const drawAll = () => {
    while (view.drawn < view.pieces.length) drawPiece(view, end);
  };
  node.append(end);
  if (view.pieces.length > 1) end.append(button(`show all ${count(stream.length)} tokens`, drawAll, { class: "more" }));
  if (view.pieces.length) drawPiece(view, end);
  new IntersectionObserver(
    (entries) => entries.some((entry) => entry.isIntersecting) && end.isConnected && drawAhead(view, end),
    { rootMargin: "1200px" },
  ).observe(end);
  listen(view);
  state.side.append(view.detail, view.list);
  view.recolor = (color) => {
    node.dataset.color = color;
    drawList(view, color);
  };
  view.showToken = (t, isPicked) => showToken(view, end, t, isPicked);
  node.classList.toggle("is-relative", query.scale === "relative");
  view.recolor(query.color);
  drawDetail(view);
  return view;
}

/* Segments, with long ones cut into pieces: [{segment, start, end, isFirst}]. */
function piecesOf(stream) {
  const pieces = [];
  for (const segment of stream.segments) {
    for (let start = segment.start; start < segment.end;) {
      let end = Math.min(segment.end, start + TOKENS_AT_ONCE);
      const fold = stream.folds.find((each) => each.start < end && each.end > end);
      if (fold) end = fold.end;
      pieces.push({ segment, start, end, isFirst: start === segment.start });
      start = end;
    }
  }
  return pieces;
}

/* Draws pieces until the end of the drawn part is out of sight. */
function drawAhead(view, end) {
  if (view.drawn >= view.pieces.length || !end.isConnected) return;
  if (end.getBoundingClientRect().top > innerHeight + 1200) return;
  drawPiece(view, end);
  requestAnimationFrame(() => drawAhead(view, end));
}

function drawPiece(view, end) {
  const { stream, pieces } = view,
    piece = pieces[view.drawn];
  const { segment } = piece;
  view.drawn += 1;
  const flow = make(".flow", { dir: "ltr" });
  let fold = stream.folds.findIndex((each) => each.end > piece.start);
  for (let t = piece.start; t < piece.end; t += 1) {
    if (fold >= 0 && stream.folds[fold] && stream.folds[fold].start === t) {
      flow.append(foldBox(view, stream.folds[fold]));
      t = stream.folds[fold].end - 1;
      fold += 1;
    } else flow.append(...tokenNodes(view, t));
  }
  const name = segment.kind === "model" ? `turn ${segment.turn}` : segment.kind === "env" ? "environment" : "prompt";
  const label = piece.isFirst
    ? make(
        ".segment-label",
        make("span", { text: name }),
        make("span.segment-size", { text: count(segment.end - segment.start) }),
      )
    : make(".segment-label");
  const box = make(
    `.segment.is-${segment.kind}`,
    piece.isFirst && segment.kind === "model" ? { data: { turn: segment.turn }, tabindex: "-1" } : {},
    label,
    flow,
  );
  end.before(box);
  if (view.drawn === pieces.length) clear(end);
}

function tokenNodes(view, t) {
  const { stream } = view,
    text = stream.texts[t];
  const span = make("span", { class: tokenClass(stream, t) });
  span.dataset.t = t;
  appendToken(span, text);
  view.spans.set(t, span);
  return text.includes("\n") ? [span, make("br")] : [span];
}

function foldBox(view, fold) {
  const box = make(
    "span.fold",
    { data: { t: fold.start } },
    imageButton(view.state.run.number, fold.name, "image of the stream"),
    make("span", { text: `image, ${plural(fold.tokens, "token")}` }),
  );
  view.spans.set(fold.start, box);
  return box;
}

function listen(view) {
  const tokenOf = (event) => {
    const found = event.target.closest("[data-t]");
    return found ? Number(found.dataset.t) : -1;
  };
  tipOn(view.node, (event) => tokenOf(event) >= 0 && tokenLines(view.state.stream, tokenOf(event)));
  view.node.addEventListener("click", (event) => {
    const t = tokenOf(event);
    if (t >= 0) view.showToken(t, true);
  });
  view.node.addEventListener("keydown", (event) => {
    const change = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!change) return;
    event.preventDefault();
    const fold = view.stream.folds.find((each) => each.start === view.picked);
    view.showToken(change > 0 && fold ? fold.end : view.picked + change, true);
  });
}

function drawDetail(view) {
  clear(view.detail).append(make("h2", { text: "Token" }));
  if (view.picked < 0) {
    view.detail.append(
      make("p.hint", { text: "Point at a token, or click it to keep it here; ← → go to the next one." }),
    );
    return;
  }
  const [head, ...lines] = tokenLines(view.state.stream, view.picked);
  view.detail.append(make("p.token-text", { text: head, dir: "auto" }), factList(lines));
}

/* Lists the tokens with the largest gaps or the lowest probabilities; a click goes to the token. */
function drawList(view, color) {
  const { stream } = view.state,
    isProbability = color === "probability";
  clear(view.list);
  const places = color === "mask" ? [] : mostNotable(stream, MOST_LISTED, color);
  if (color === "mask") return;
  view.list.append(make("h2", { text: isProbability ? "Least probable" : "Largest gaps" }));
  if (!places.length)
    view.list.append(
      make("p.hint", {
        text: isProbability ? "No token was less probable than 0.99." : noGap(view.state.episode),
      }),
    );
  const kind = `span.gap-token${view.state.query.scale === "relative" ? ".is-relative" : ""}`;
  view.list.append(
    make(
      "ol.gaps",
      places.map((t) => {
        const chip = appendToken(
          make("span", { class: tokenClass(stream, t), dir: "ltr" }),
          stream.texts[t].slice(0, 24),
        );
        const value = isProbability ? `p ${figure(Math.exp(stream.rollout[t]))}` : figure(stream.gap[t]);
        const label = `go to token ${t}, ${visible(stream.texts[t].slice(0, 24))}: ${value}`;
        const parts = [
          make(kind, { data: { color } }, chip),
          make("span.gap-place", { text: `turn ${stream.turn[t]}` }),
          make("span.gap-value", { text: value }),
        ];
        return make(
          "li",
          add(
            button("", () => view.showToken(t, true), { "aria-label": label }),
            parts,
          ),
        );
      }),
    ),
  );
}

function noGap(episode) {
  if (!episode.score) return "The trainer has not scored this episode.";
  return scoreOf(episode) ? "No token has a gap." : "The trainer has scored other tokens under this id.";
}

function showToken(view, end, wanted, isPicked) {
  const last = view.stream.length - 1;
  if (last < 0) return;
  const t = Math.max(0, Math.min(last, Math.trunc(wanted)));
  const fold = view.stream.folds.find((each) => each.start <= t && t < each.end);
  const place = fold ? fold.start : t;
  while (view.drawn < view.pieces.length && !view.spans.has(place)) drawPiece(view, end);
  if (!isPicked) return;
  const before = view.spans.get(view.picked),
    now = view.spans.get(place);
  if (before) before.classList.remove("is-picked");
  view.picked = place;
  view.state.change({ token: place });
  drawDetail(view);
  if (!now) return;
  now.classList.add("is-picked");
  const box = now.getBoundingClientRect();
  if (box.top < 120 || box.bottom > innerHeight - 40) now.scrollIntoView({ block: "center" });
}
