/* Lists each text in sight whose contrast to what is behind it is below 4.5 (WCAG 2.2, 1.4.3): "3.19 p.hint: text". */
() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const channels = (color) => {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = color;
      pen.fillRect(0, 0, 1, 1);
      known.set(color, [...pen.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(color);
  };
  const over = ([r, g, b, a], behind, opacity = 1) => {
    const share = (a / 255) * opacity;
    return [...[r, g, b].map((value, k) => value * share + behind[k] * (1 - share)), 255];
  };
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  /* The colours behind and of a text in the last of these elements, each inside the one before. */
  const painted = ([element, ...inner], behind, color) => {
    const style = getComputedStyle(element);
    const own = over(channels(style.backgroundColor), behind);
    const [back, text] = inner.length ? painted(inner, own, color) : [own, over(channels(color), own)];
    return [back, text].map((each) => over(each, behind, Number(style.opacity)));
  };
  const lineage = (node) => (node ? [...lineage(node.parentElement), node] : []);
  const found = new Set();
  const check = (element, color, text) => {
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) return;
    const [back, front] = painted(lineage(element), [255, 255, 255, 255], color);
    const value = ratio(back, front);
    const name = `${element.parentElement.getAttribute("class")} > ${element.tagName}.${element.getAttribute("class")}`;
    if (value < 4.5) found.add(`${value.toFixed(2)} ${name}: ${text.trim().slice(0, 40)}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("script, style, noscript")) continue;
    const style = getComputedStyle(element);
    check(element, element instanceof SVGElement ? style.fill : style.color, walker.currentNode.data);
  }
  for (const field of document.querySelectorAll("[placeholder]"))
    check(field, getComputedStyle(field, "::placeholder").color, field.placeholder);
  return [...found].sort();
};
