/* A run that goes on: what is new is asked for every two seconds and taken in where one is. A run that was taken back,
   so that all of it is new, is shown from the start. */

const POLL_MS = 2000;

function startLive() {
  if (app.page.mode !== "server" || !app.runs.some((run) => run.live)) return;
  showLive("live", "the run goes on");
  setTimeout(poll, POLL_MS);
}

async function poll() {
  let isNew = false,
    isOther = false;
  try {
    for (const run of app.runs.filter((each) => each.live)) {
      const { columns } = run;
      isNew = takeOverview(run, await app.source.overview(run.number, run.cursor)) || isNew;
      isOther = isOther || columns !== run.columns;
    }
    if (app.runs.some((run) => run.live)) showLive("live", "the run goes on");
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
