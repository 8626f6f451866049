/* Reads the data: from elements of this file, or from the server that sent the page. */

const IMAGE_NAME = /^images\/[0-9a-f]{8,64}\.png$/;
const KEPT_BLOCKS = 12;

/* {overview(run, after), episode(run, index), image(run, name)}; `page` is {runs, block, mode, live}. */
function openSource(page) {
  return page.mode === "server" ? serverSource() : fileSource(page.block || 64);
}

function fileSource(blockSize) {
  const kept = new Map();
  const block = (run, number) => {
    const key = `${run}-${number}`;
    const found = kept.get(key) || inflate(`run-${run}-block-${number}`);
    kept.delete(key);
    kept.set(key, found);
    if (kept.size > KEPT_BLOCKS) kept.delete(kept.keys().next().value);
    return found;
  };
  return {
    overview: (run) => inflate(`run-${run}-overview`),
    episode: async (run, index) => (await block(run, Math.floor(index / blockSize)))[index % blockSize],
    image: (run, name) => {
      const part = byId(`run-${run}-image-${name.slice(7, -4)}`);
      return part ? `data:image/png;base64,${part.textContent.trim()}` : "";
    },
  };
}

function serverSource() {
  const ask = async (path) => {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  };
  return {
    overview: (run, after) => ask(`data/${run}/overview${after ? `?after=${encodeURIComponent(after)}` : ""}`),
    episode: (run, index) => ask(`data/${run}/episode/${index}`),
    image: (run, name) => `data/${run}/${name}`,
  };
}

/* Reads an element of the page that holds JSON as raw deflate in Base64. */
async function inflate(id) {
  const part = byId(id);
  if (!part) throw new Error(`the page holds no ${id}`);
  const stream = new Blob([bytesOf(part.textContent.trim())])
    .stream()
    .pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).json();
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/* An image of a run, or a note if there is none. */
function imageOf(run, name, label) {
  const source = IMAGE_NAME.test(name) ? app.source.image(run, name) : "";
  if (!source) return make("span.no-image", { text: "no image", title: visible(String(name).slice(0, 200)) });
  const image = make("img", { alt: label || "image", decoding: "async" });
  image.addEventListener("error", () =>
    image.replaceWith(make("span.no-image", { text: "broken image", title: name })),
  );
  image.src = source;
  return image;
}

function imageButton(run, name, label) {
  const image = imageOf(run, name, label);
  if (image.tagName !== "IMG") return image;
  const box = make("button.image", { type: "button", "aria-label": `enlarge ${label || "image"}` }, image);
  box.addEventListener("click", () => enlarge(image.src, label));
  return box;
}

function enlarge(source, label) {
  const dialog = clear(byId("image"));
  const image = make("img", { alt: label || "image" });
  image.src = source;
  image.addEventListener("load", () => {
    image.style.width = `min(90vw, ${Math.max(image.naturalWidth, Math.min(900, image.naturalWidth * 4))}px)`;
  });
  dialog.append(image, make("p", { text: label || "" }));
  dialog.onclick = () => dialog.close();
  dialog.showModal();
}
