/* Line charts over training steps, drawn as SVG. Charts of one set mark the same step under the pointer. */

const CHART = { height: 128, left: 44, right: 10, top: 8, bottom: 20 };
const MANY_POINTS = 24;

/* A chart of {title, series: [{run, points: [[step, value], ...]}]}; `set` are the charts that share a marked step.
   `onStep` is called with the step that a person chooses. */
function lineChart(title, series, set, onStep) {
  const drawn = series.filter((each) => each.points.length);
  const plot = makeSvg("svg.plot", { role: "img", "aria-label": describeSeries(title, drawn) });
  const values = make(
    ".chart-value",
    drawn.map((each) => make(`span.series-${each.run}`, { text: figure(each.points.at(-1)[1]) })),
  );
  const chart = { title, series: drawn, plot, scale: null, cursor: null };
  const box = make(
    "figure.chart",
    { data: { metric: title } },
    make("figcaption", make("span", { text: title }), values),
    plot,
  );
  new ResizeObserver(() => draw(chart)).observe(plot);
  plot.addEventListener("pointermove", (event) => point(chart, set, nearestStep(chart, event), event));
  plot.addEventListener("pointerleave", () => unmark(set));
  if (onStep) {
    plot.classList.add("is-link");
    plot.addEventListener("click", (event) => {
      hideTip();
      onStep(nearestStep(chart, event));
    });
    listenToSteps(chart, set, onStep);
  }
  set.push(chart);
  return box;
}

/* By keyboard, arrows mark a step and Enter chooses it. */
function listenToSteps(chart, set, onStep) {
  const { plot } = chart;
  const steps = [...new Set(chart.series.flatMap((each) => each.points.map(([step]) => step)))].sort((a, b) => a - b);
  let at = steps.length - 1;
  const markAt = (wanted) => {
    at = Math.max(0, Math.min(steps.length - 1, wanted));
    const box = plot.getBoundingClientRect();
    point(chart, set, steps[at], { clientX: box.left + chart.scale.x(steps[at]), clientY: box.bottom });
    plot.setAttribute("aria-valuenow", steps[at]);
    plot.setAttribute("aria-valuetext", byId("tip").innerText);
  };
  const actions = {
    ArrowLeft: () => markAt(at - 1),
    ArrowRight: () => markAt(at + 1),
    Home: () => markAt(0),
    End: () => markAt(steps.length - 1),
    Enter: () => onStep(steps[at]),
  };
  const slider = { role: "slider", tabindex: "0", "aria-valuemin": steps[0], "aria-valuemax": steps.at(-1) };
  for (const [name, value] of Object.entries(slider)) plot.setAttribute(name, value);
  plot.addEventListener("focus", () => plot.matches(":focus-visible") && markAt(at));
  plot.addEventListener("blur", () => unmark(set));
  plot.addEventListener("keydown", (event) => {
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });
}

function unmark(set) {
  hideTip();
  set.forEach((each) => mark(each, null));
}

function describeSeries(title, series) {
  const ends = series.map(
    ({ points }) =>
      `${figure(points[0][1])} at step ${points[0][0]}, ${figure(points.at(-1)[1])} at step ${points.at(-1)[0]}`,
  );
  return `${title}: ${ends.join("; ") || "no values"}`;
}

function draw(chart) {
  const width = chart.plot.clientWidth,
    { height, left, right, top, bottom } = CHART;
  const all = chart.series.flatMap((each) => each.points);
  clear(chart.plot);
  if (!width || !all.length) return;
  chart.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.scale = scaleOf(all, [left, width - right], [height - bottom, top]);
  drawAxes(chart, width);
  for (const { run, points } of chart.series) drawSeries(chart, run, points);
  chart.cursor = chart.plot.appendChild(makeSvg("g.cursor", { visibility: "hidden" }));
}

/* Values that span more than a factor of thirty get a logarithmic axis. */
function scaleOf(points, [x0, x1], [y0, y1]) {
  const steps = points.map(([step]) => step),
    values = points.map(([, value]) => value);
  const first = least(steps),
    last = most(steps);
  let low = least(values),
    high = most(values);
  const isLog = low > 0 && high / low > 30;
  const bend = isLog ? Math.log10 : (value) => value;
  [low, high] = [bend(low), bend(high)];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low >= 0 && low - room < 0 && !isLog ? 0 : low - room, high + room];
  return {
    isLog,
    low,
    high,
    first,
    last,
    x: (step) => x0 + ((step - first) / (last - first || 1)) * (x1 - x0),
    y: (value) => y0 + ((bend(value) - low) / (high - low)) * (y1 - y0),
  };
}

function least(values) {
  return values.reduce((a, b) => Math.min(a, b), Infinity);
}

function most(values) {
  return values.reduce((a, b) => Math.max(a, b), -Infinity);
}

function drawAxes(chart, width) {
  const { scale, plot } = chart,
    { height, left, right } = CHART;
  for (const tick of valueTicks(scale)) {
    const y = scale.y(tick);
    plot.append(
      makeSvg("line.grid", { x1: left, x2: width - right, y1: y, y2: y }),
      makeSvg("text.tick", { x: left - 6, y: y + 3.5, "text-anchor": "end", text: figure(tick) }),
    );
  }
  const steps = ticks(scale.first, scale.last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger);
  for (const step of steps)
    plot.append(makeSvg("text.tick", { x: scale.x(step), y: height - 5, "text-anchor": "middle", text: count(step) }));
}

function valueTicks({ isLog, low, high }) {
  if (!isLog) {
    const few = ticks(low, high, 3);
    return few.length > 1 ? few : ticks(low, high, 6);
  }
  const powers = ticks(Math.ceil(low), Math.floor(high), 3).filter(Number.isInteger);
  return (powers.length > 1 ? powers : [low + (high - low) * 0.1, high - (high - low) * 0.1]).map(
    (power) => 10 ** power,
  );
}

function drawSeries({ scale, plot }, run, points) {
  const path = (line) =>
    line.map(([step, value], i) => `${i ? "L" : "M"}${scale.x(step).toFixed(1)} ${scale.y(value).toFixed(1)}`).join("");
  const isLong = points.length > MANY_POINTS;
  plot.append(makeSvg(`path.line.series-${run}${isLong ? ".is-raw" : ""}`, { d: path(points) }));
  if (isLong) plot.append(makeSvg(`path.line.series-${run}`, { d: path(smoothed(points)) }));
  if (!isLong)
    for (const [step, value] of points)
      plot.append(makeSvg(`circle.dot.series-${run}`, { cx: scale.x(step), cy: scale.y(value), r: 2.25 }));
}

/* A moving mean; its window is a twentieth of all points to either side. */
function smoothed(points) {
  const half = Math.max(1, Math.round(points.length / 20));
  return points.map(([step], i) => {
    const near = points.slice(Math.max(0, i - half), i + half + 1);
    return [step, near.reduce((sum, [, value]) => sum + value, 0) / near.length];
  });
}

function nearestStep(chart, event) {
  if (!chart.scale) return null;
  const x = event.clientX - chart.plot.getBoundingClientRect().left;
  let best = null,
    distance = Infinity;
  for (const [step] of chart.series.flatMap((each) => each.points)) {
    const off = Math.abs(chart.scale.x(step) - x);
    if (off < distance) [best, distance] = [step, off];
  }
  return best;
}

/* Marks a step in all charts of the set, with a tip at a place such as the pointer's. */
function point(chart, set, step, place) {
  set.forEach((each) => mark(each, step));
  const lines = chart.series.map(({ run, points }) => [
    app.runs.length > 1 ? app.runs[run].name : chart.title,
    figure((points.find(([at]) => at === step) || [])[1]),
  ]);
  showTip(place, [`step ${count(step)}`, ...lines]);
}

function mark({ scale, cursor, series }, step) {
  if (!cursor) return;
  cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
  if (step === null || step < scale.first || step > scale.last) return;
  const x = scale.x(step);
  clear(cursor).append(makeSvg("line", { x1: x, x2: x, y1: CHART.top, y2: CHART.height - CHART.bottom }));
  for (const { run, points } of series) {
    const found = points.find(([at]) => at === step);
    if (found) cursor.append(makeSvg(`circle.dot.series-${run}`, { cx: x, cy: scale.y(found[1]), r: 3.5 }));
  }
}

/* [[step, value], ...] of a metric, without rows that have no number. */
function metricPoints(run, name) {
  return run.metrics.filter((row) => isNumber(row.step) && isNumber(row[name])).map((row) => [row.step, row[name]]);
}

/* Names of all metrics that hold numbers, sorted. */
function metricNames(runs) {
  const names = new Set();
  for (const run of runs)
    for (const row of run.metrics)
      for (const [name, value] of Object.entries(row)) if (isNumber(value) && name !== "step") names.add(name);
  return [...names].sort((a, b) => a.localeCompare(b));
}
