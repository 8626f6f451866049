/* A table that draws only the visible rows. */

const ROW_HEIGHT = 44;
const SPARE_ROWS = 6;
const THUMBNAIL_WAIT = 90;

/* columns: [{name, title, kind, hint, fill(cell, place)}]; options: {order, onSort, label}. */
function makeTable(columns, options) {
  const head = make(
    ".row.table-head",
    { role: "row", "aria-rowindex": 1 },
    columns.map((column) => headCell(column, options)),
  );
  const space = make(".table-space", { role: "rowgroup" });
  const scroller = make(
    ".table",
    { role: "grid", "aria-label": options.label, "aria-colcount": columns.length, tabindex: "0" },
    head,
    space,
  );
  const table = { node: scroller, head, space, columns, options, places: [], rows: [], at: -1, frame: 0 };
  const drawSoon = () => {
    table.frame ||= requestAnimationFrame(() => {
      table.frame = 0;
      drawRows(table);
    });
  };
  table.loadImages = debounce(THUMBNAIL_WAIT, () => table.rows.forEach((row) => loadImage(row)));
  scroller.addEventListener("scroll", drawSoon, { passive: true });
  new ResizeObserver(drawSoon).observe(scroller);
  return table;
}

function headCell(column, { order, onSort }) {
  const isDown = order === `-${column.name}`,
    isUp = order === column.name;
  const cell = make(`.cell.${column.kind || "plain"}`, {
    role: "columnheader",
    "aria-sort": isDown ? "descending" : isUp ? "ascending" : "none",
  });
  if (!column.title) return cell;
  if (column.isFixed) return add(cell, [make("span", { text: column.title })]);
  const next = column.kind === "figure" ? [`-${column.name}`, column.name, ""] : [column.name, `-${column.name}`, ""];
  const text = column.title + (isDown ? " ↓" : isUp ? " ↑" : "");
  return add(cell, [button(text, () => onSort(next[(next.indexOf(order) + 1) % next.length]), { title: column.hint })]);
}

/* Shows other episodes; the top row keeps its position on screen if it is still among them. */
function setPlaces(table, places, isKept) {
  const top = table.node.scrollTop,
    first = Math.floor(top / ROW_HEIGHT);
  const anchor = isKept && first > 0 ? table.places[first] : undefined;
  const selected = table.at >= 0 ? table.places[table.at] : undefined;
  table.places = places;
  table.at = selected === undefined ? -1 : places.indexOf(selected);
  table.space.style.height = `${places.length * ROW_HEIGHT}px`;
  table.node.setAttribute("aria-rowcount", String(places.length + 1));
  const now = anchor === undefined ? -1 : places.indexOf(anchor);
  if (now >= 0 && now !== first) table.node.scrollTop = top + (now - first) * ROW_HEIGHT;
  for (const row of table.rows) Object.assign(row, { place: undefined, at: -1 });
  drawRows(table);
}

/* Updates the visible rows; a row of the pool is filled again only if it shows another episode. */
function drawRows(table) {
  const { node, places } = table;
  const height = node.clientHeight || 600;
  const first = Math.max(0, Math.floor(node.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
  const last = Math.min(places.length, Math.ceil((node.scrollTop + height) / ROW_HEIGHT) + SPARE_ROWS);
  const needed = Math.min(places.length, Math.ceil(height / ROW_HEIGHT) + 2 * SPARE_ROWS + 1);
  while (table.rows.length < needed) table.rows.push(makeRow(table));
  while (table.rows.length > needed) table.rows.pop().node.remove();
  let isChanged = false;
  for (let i = first; i < last; i += 1) isChanged = fillRow(table, table.rows[i % table.rows.length], i) || isChanged;
  for (const row of table.rows) row.node.hidden = !(row.at >= first && row.at < last);
  if (isChanged) table.loadImages();
}

function makeRow(table) {
  const cells = table.columns.map((column) => make(`.cell.${column.kind || "plain"}`, { role: "gridcell" }));
  const node = make(".row", { role: "row", id: `row-${table.rows.length}` }, cells);
  table.space.append(node);
  return { node, cells, place: undefined, at: -1, waiting: null };
}

function fillRow(table, row, i) {
  const place = table.places[i],
    isSelected = i === table.at;
  if (row.place === place && row.at === i && row.isSelected === isSelected) return false;
  if (row.at !== i) row.node.style.transform = `translateY(${i * ROW_HEIGHT}px)`;
  if (row.place !== place) {
    row.waiting = null;
    table.columns.forEach((column, k) => fillCell(column, row.cells[k], place, row));
  }
  if (isSelected) table.node.setAttribute("aria-activedescendant", row.node.id);
  Object.assign(row, { place, at: i, isSelected });
  row.node.setAttribute("aria-rowindex", String(i + 2));
  row.node.setAttribute("aria-selected", String(isSelected));
  return true;
}

function fillCell({ fill, toneOf }, cell, place, row) {
  fill(cell, place, row);
  if (toneOf) cell.dataset.tone = toneOf(place);
}

/* Loads a thumbnail; called when scrolling has stopped. */
function loadImage(row) {
  if (!row.waiting) return;
  const { cell, make: draw } = row.waiting;
  row.waiting = null;
  clear(cell).append(draw());
}

/* Moves the selection and scrolls to it. */
function selectRow(table, at) {
  if (!table.places.length) return;
  table.at = Math.max(0, Math.min(table.places.length - 1, at));
  showRow(table, table.at);
  drawRows(table);
}

function showRow(table, at) {
  const { node } = table,
    top = at * ROW_HEIGHT,
    headHeight = table.head.offsetHeight;
  if (top < node.scrollTop) node.scrollTop = top;
  else if (top + ROW_HEIGHT + headHeight > node.scrollTop + node.clientHeight)
    node.scrollTop = top + ROW_HEIGHT + headHeight - node.clientHeight;
}

function rowKeys(state) {
  const move = (change) => () => selectRow(state.table, state.table.at + change);
  return { j: move(1), k: move(-1) };
}
