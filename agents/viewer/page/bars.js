/* Bar charts of counts; each bar is a link to the episodes that it counts. */

/* Horizontal bars of [{name, count, href, tone}]. */
function barList(label, rows) {
  const largest = Math.max(1, ...rows.map((row) => row.count));
  const list = make("ul.bars", { "aria-label": label });
  for (const row of rows) {
    const bar = make(`span.bar.tone-${row.tone || "plain"}`);
    bar.style.width = `${Math.max(0.5, (100 * row.count) / largest)}%`;
    list.append(
      make(
        "li",
        make(
          "a",
          { href: row.href },
          make("span.bar-name", { text: spaced(row.name) }),
          make("span.bar-track", bar),
          make("span.bar-count", { text: count(row.count) }),
        ),
      ),
    );
  }
  return list;
}

/* Vertical bars of the values of a column: one for each of at most twelve values, else twenty ranges of equal width. */
function histogram(label, values, hrefOf) {
  const numbers = values.filter(isNumber);
  const bins = binsOf(numbers);
  const largest = Math.max(1, ...bins.map((bin) => bin.count));
  const box = make(".histogram", { role: "group", "aria-label": label });
  for (const bin of bins) {
    const bar = make("span.column");
    bar.style.height = `${(100 * bin.count) / largest}%`;
    const name = bin.low === bin.high ? figure(bin.low) : `${figure(bin.low)} to ${figure(bin.high)}`;
    const each = make(
      "a",
      { href: hrefOf(bin), "aria-label": `${name}: ${plural(bin.count, "episode")}` },
      make("span.column-count", { text: bins.length <= 12 || bin.count === largest ? count(bin.count) : "" }),
      make("span.column-track", bar),
      make("span.column-name", { text: bins.length <= 12 || bin.isEdge ? figure(bin.low) : "" }),
    );
    tipOn(each, () => [name, ["episodes", count(bin.count)], ["share", percent(bin.count / numbers.length)]]);
    box.append(each);
  }
  if (!bins.length) box.append(make("p.none", { text: "no values" }));
  return box;
}

function binsOf(numbers) {
  const counts = new Map();
  for (const value of numbers) counts.set(value, (counts.get(value) || 0) + 1);
  const distinct = [...counts.keys()].sort((a, b) => a - b);
  if (distinct.length <= 12)
    return distinct.map((value) => ({ low: value, high: value, count: counts.get(value), isEdge: true }));
  const low = distinct[0],
    width = (distinct.at(-1) - low) / 20;
  const bins = Array.from({ length: 20 }, (_, k) => ({
    low: low + k * width,
    high: low + (k + 1) * width,
    count: 0,
    isEdge: k % 5 === 0 || k === 19,
  }));
  for (const [value, times] of counts) bins[Math.min(19, Math.floor((value - low) / width))].count += times;
  return bins;
}

/* The colour of an end reason: the environment ended the task, a limit ended it, or a fault. */
function endTone(reason) {
  if (reason === "completed") return "good";
  return ["max_turns", "token_budget", "context_full"].includes(reason) ? "limit" : "fault";
}
