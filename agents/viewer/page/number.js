/* Formats numbers: short and aligned, with a dash for a missing one. */

const NONE = "–";

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/* About three significant digits: 0.281, 14.2, 1,243, 6.5e-14. */
function figure(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e9) return value.toExponential(1).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size < 10) return String(Number(value.toPrecision(3)));
  return value.toLocaleString("en", { maximumFractionDigits: size < 100 ? 1 : 0 });
}

function count(value) {
  return isNumber(value) ? value.toLocaleString("en") : NONE;
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/* Rewards and advantages keep two digits, so that columns of them align. */
function reward(value) {
  return isNumber(value) ? value.toFixed(2).replace(/^-(0\.00)$/, "$1") : NONE;
}

function signed(value) {
  if (!isNumber(value)) return NONE;
  const digits = Math.abs(value).toFixed(2);
  return digits === "0.00" ? digits : (value > 0 ? "+" : "−") + digits;
}

function percent(value) {
  return isNumber(value) ? `${(100 * value).toFixed(1)}%` : NONE;
}

function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value < 0.001) return value === 0 ? "0 s" : `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value),
    minutes = Math.round(value / 60);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function compactCount(value) {
  if (!isNumber(value)) return NONE;
  if (value < 10000) return count(value);
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)}M`;
}

/* Round tick values that cover [low, high]. */
function ticks(low, high, most) {
  const span = high - low || 1;
  const raw = span / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1)
    found.push(Number((k * step).toPrecision(12)));
  return found;
}
