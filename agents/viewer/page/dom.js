/* Makes elements. Text enters the page only as text nodes, and links only as fragments of this page. */

"use strict";

const SVG = "http://www.w3.org/2000/svg";

/* make("a.quiet", {href: "#/", text: "Overview"}, child, ...): properties are optional, children are nodes or texts. */
function make(selector, ...rest) {
  const [tag, ...classes] = selector.split(".");
  return fillElement(document.createElement(tag || "div"), classes, rest);
}

function makeSvg(selector, ...rest) {
  const [tag, ...classes] = selector.split(".");
  return fillElement(document.createElementNS(SVG, tag), classes, rest);
}

function fillElement(node, classes, rest) {
  const [props, ...children] = isProps(rest[0]) ? rest : [{}, ...rest];
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on")
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") for (const [key, item] of Object.entries(value)) node.dataset[key] = item;
    else if (name === "href" && !String(value).startsWith("#")) throw new Error("a link must stay on the page");
    else node.setAttribute(name, value === true ? "" : value);
  }
  return add(node, children);
}

function isProps(value) {
  return Boolean(value) && Object.getPrototypeOf(value) === Object.prototype;
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child);
  }
  return node;
}

function clear(node) {
  node.replaceChildren();
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

function button(text, onClick, props) {
  return make("button", { type: "button", text, ...props, on: { click: onClick } });
}

/* A group of buttons of which one is pressed; calls onPick with its value. */
function choice(label, options, chosen, onPick) {
  const box = make(".choice", { role: "group", "aria-label": label });
  for (const [value, text, hint] of options) {
    const each = button(
      text,
      () => {
        press(box, value);
        onPick(value);
      },
      { data: { value }, title: hint },
    );
    each.setAttribute("aria-pressed", String(value === chosen));
    box.append(each);
  }
  return box;
}

function press(box, value) {
  for (const each of box.children) each.setAttribute("aria-pressed", String(each.dataset.value === value));
}

function select(label, options, chosen, onPick) {
  const box = make("select", { "aria-label": label, on: { change: () => onPick(box.value) } });
  for (const [value, text] of options) {
    const option = make("option", { value, text });
    option.selected = value === chosen;
    box.append(option);
  }
  return box;
}

/* Returns a function that runs `action` once, `wait` milliseconds after its last call. */
function debounce(wait, action) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), wait);
  };
}

/* Shows a tip beside the pointer over a node; linesAt(event) returns [name, value] pairs and texts, or nothing. */
function tipOn(node, linesAt) {
  node.addEventListener("pointermove", (event) => {
    const lines = linesAt(event);
    if (lines) showTip(event, lines);
    else hideTip();
  });
  node.addEventListener("pointerleave", hideTip);
}

function showTip(event, lines) {
  const tip = clear(byId("tip"));
  for (const line of lines) {
    if (Array.isArray(line))
      tip.append(
        make("div", make("span.tip-name", { text: line[0] }), make("span.tip-value", { text: line[1], dir: "auto" })),
      );
    else tip.append(make(".tip-head", { text: line, dir: "auto" }));
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - 10 - box.height : event.clientY + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
