/* Follows a live run: asks for new data every two seconds and adds them to the current view. After a rollback, all data
   are new, and the view is drawn from the start. */

const POLL_MS = 2000;

function startLive() {
  if (app.page.mode !== "server" || !app.runs.some((run) => run.live)) return;
  showLive("live", "the run is in progress");
  setTimeout(poll, POLL_MS);
}

async function poll() {
  let isNew = false,
    isOther = false;
  try {
    for (const run of app.runs.filter((each) => each.live)) {
      const { columns } = run;
      isNew = applyOverview(run, await app.source.overview(run.number, run.cursor)) || isNew;
      isOther = isOther || columns !== run.columns;
    }
    if (app.runs.some((run) => run.live)) showLive("live", "the run is in progress");
    else showLive("ended", "the run has ended");
  } catch {
    showLive("lost", "the connection is lost; trying again");
  }
  if (isOther) showRoute();
  else if (isNew) {
    drawTabs();
    if (app.view && app.view.update) app.view.update();
  }
  if (app.runs.some((run) => run.live)) setTimeout(poll, POLL_MS);
}

function showLive(word, title) {
  const mark = byId("live");
  if (mark.dataset.word === word) return;
  mark.hidden = false;
  mark.dataset.word = word;
  mark.textContent = word === "lost" ? "connection lost" : word === "ended" ? "run ended" : "live";
  mark.title = title;
}
