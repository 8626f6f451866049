/* Starts the page: reads the data, then draws the view that the address names, and again when it changes. */

const VIEWS = {
  "": showOverview,
  episodes: showEpisodes,
  episode: showEpisode,
  group: showGroup,
  compare: showCompare,
};

const app = { page: null, source: null, runs: [], route: null, view: null, list: null, left: null };

/* The run that a query names. */
function runOf(query) {
  return app.runs[query.run === "1" && app.runs.length > 1 ? 1 : 0];
}

function showRoute() {
  if (app.view && app.view.leave) {
    app.view.leave();
    app.left = app.list;
  }
  hideTip();
  app.route = readFragment(location.hash);
  const name = app.route.parts[0] || "";
  const root = clear(byId("main"));
  const show = Object.hasOwn(VIEWS, name) ? VIEWS[name] : null;
  root.className = `view-${show ? name || "overview" : "missing"}`;
  app.view = show ? show(root, app.route) : missing(root, "There is no such view.");
  document.title = `${app.view.title} · ${app.runs.map((run) => visible(run.name)).join(" and ")}`;
  drawTabs();
  if (!app.route.query.turn) scrollTo(0, 0);
  const heading = root.querySelector("h1");
  if (heading) heading.focus({ preventScroll: true });
}

function drawTabs() {
  const name = (app.route && app.route.parts[0]) || "";
  const run = runOf(app.route.query);
  const tab = (text, href, isHere, note) =>
    make("a", { href, "aria-current": isHere ? "page" : null }, text, note && make("span.tab-note", { text: note }));
  const is = (...names) => names.includes(name);
  const tabs = [
    tab("Overview", link([], runQuery(run.number, {})), is("")),
    tab("Episodes", listHref(run), is("episodes", "episode", "group"), compactCount(run.size)),
  ];
  if (app.runs.length > 1) {
    tabs.push(tab("Compare", "#/compare", is("compare")));
    const to = (number) => (is("episodes") ? link(["episodes"], runQuery(number, {})) : link([], runQuery(number, {})));
    tabs.push(
      make(
        "span.run-switch",
        { role: "group", "aria-label": "run" },
        app.runs.map((each) =>
          make(
            `a.series-${each.number}`,
            {
              href: to(each.number),
              "aria-current": each === run && !is("compare") ? "true" : null,
              title: visible(each.folder),
            },
            make("bdi", { text: visible(each.name) }),
          ),
        ),
      ),
    );
  }
  add(clear(byId("tabs")), tabs);
  byId("run-name").textContent = app.runs.length > 1 ? "TrueTurn" : visible(run.name);
}

async function start() {
  app.page = JSON.parse(byId("page").textContent);
  app.source = openSource(app.page);
  startTheme();
  byId("help-button").addEventListener("click", showHelp);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  byId("main").append(make("p.none", { text: "Reading the recording …" }));
  try {
    const numbers = Array.from({ length: app.page.runs || 1 }, (_, run) => run);
    app.runs = (await Promise.all(numbers.map((run) => app.source.overview(run)))).map((overview, run) =>
      makeRun(run, overview),
    );
  } catch (error) {
    clear(byId("main")).append(
      make("p.none", { role: "alert", text: `The recording could not be read: ${error.message}` }),
    );
    return;
  }
  listenToKeys();
  addEventListener("hashchange", showRoute);
  showRoute();
  startLive();
  document.documentElement.dataset.ready = "true";
}

start();
