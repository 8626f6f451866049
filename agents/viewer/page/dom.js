/* Makes elements. Text only ever enters the page through text nodes, links only as fragments of this page. */

"use strict";

const SVG = "http://www.w3.org/2000/svg";

/* make("a.quiet", {href: "#/", text: "Overview"}, child, ...): children are nodes or texts. */
function make(selector, props, ...children) {
  const [tag, ...classes] = selector.split(".");
  const node = document.createElement(tag || "div");
  return furnish(node, classes, props, children);
}

function makeSvg(selector, props, ...children) {
  const [tag, ...classes] = selector.split(".");
  return furnish(document.createElementNS(SVG, tag), classes, props, children);
}

function furnish(node, classes, props, children) {
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on")
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") for (const [key, item] of Object.entries(value)) node.dataset[key] = item;
    else if (name === "href" && !String(value).startsWith("#")) throw new Error("a link must stay on the page");
    else node.setAttribute(name, value === true ? "" : value);
  }
  add(node, children);
  return node;
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

/* One of several buttons that is pressed; onPick gets its value. */
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

/* Calls the function once the calls have stopped for so many milliseconds. */
function later(wait, action) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), wait);
  };
}

/* The tip follows the pointer; lines are [name, value] pairs or texts. */
function showTip(event, lines) {
  const tip = clear(byId("tip"));
  for (const line of lines) {
    if (Array.isArray(line))
      tip.append(
        make(
          "div",
          null,
          make("span.tip-name", { text: line[0] }),
          make("span.tip-value", { text: line[1], dir: "auto" }),
        ),
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
