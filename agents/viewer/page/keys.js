/* The keyboard: keys of the current view, and keys of all views. */

const KEY_HELP = [
  ["j  k", "next, previous episode, row of a table, or group"],
  ["Enter", "open the selected row"],
  ["[  ]", "previous, next turn"],
  ["1  2  3", "tokens coloured by mask, probability, gap"],
  ["v", "conversation or tokens"],
  ["←  →", "previous, next token, once one was clicked"],
  ["g", "the samples of the group side by side"],
  ["o  e  c", "overview, episodes, comparison"],
  ["/", "search"],
  ["t", "dark, light, or as the system has it"],
  ["Esc", "back to the table"],
  ["?", "this sheet"],
];

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const isField = event.target.matches("input, select, textarea");
    if (isField && event.key === "Escape") event.target.blur();
    if (isField) return;
    const action = actionOf(event);
    if (!action) return;
    event.preventDefault();
    action();
  });
}

function actionOf(event) {
  const { keys = {}, arrows } = app.view || {};
  const isPressable = event.target.matches("a, button") && (event.key === "Enter" || event.key === " ");
  if (isPressable) return null;
  const key = arrows && event.key === "ArrowDown" ? "j" : arrows && event.key === "ArrowUp" ? "k" : event.key;
  const everywhere = {
    "?": showHelp,
    t: nextTheme,
    o: () => goTo("#/"),
    e: () => goTo(listHref(runOf(app.route.query))),
    c: () => app.runs.length > 1 && goTo("#/compare"),
    "/": searchFromHere,
  };
  return keys[key] || everywhere[key];
}

function searchFromHere() {
  goTo(listHref(runOf(app.route.query)));
  const field = document.querySelector(".search");
  if (field) field.focus();
}

function showHelp() {
  const dialog = clear(byId("help"));
  dialog.append(
    make("h2", { text: "Keys" }),
    make(
      "dl.help-keys",
      KEY_HELP.map(([keys, text]) =>
        make(
          "div",
          make(
            "dt",
            keys.split("  ").map((key) => make("kbd", { text: key })),
          ),
          make("dd", { text }),
        ),
      ),
    ),
    button("close", () => dialog.close(), { class: "quiet" }),
  );
  dialog.onclick = (event) => {
    if (event.target === dialog) dialog.close();
  };
  dialog.showModal();
}

/* The theme is the system's until the user chooses one; the browser's storage keeps the choice. */
function nextTheme() {
  const themes = ["", "dark", "light"];
  const now = document.documentElement.dataset.theme || "";
  setTheme(themes[(themes.indexOf(now) + 1) % themes.length]);
  try {
    localStorage.setItem("trueturn-theme", document.documentElement.dataset.theme);
  } catch {
    /* a page opened as a file may have no storage */
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `◐ ${theme || "auto"}`;
  byId("theme").setAttribute("aria-label", `theme: ${theme || "as the system has it"}`);
  if (app.view && app.view.repaint) app.view.repaint();
}

function startTheme() {
  let theme = "";
  try {
    theme = localStorage.getItem("trueturn-theme") || "";
  } catch {
    /* no storage, as above */
  }
  setTheme(theme === "dark" || theme === "light" ? theme : "");
  byId("theme").addEventListener("click", nextTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener(
    "change",
    () => app.view && app.view.repaint && app.view.repaint(),
  );
}
