// What is wrong with the page as it is now, as a list of sentences: layout, targets, names, contrast (WCAG 2.2 AA).
() => {
  const wrong = [];
  const shown = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const all = (selector) => [...document.querySelectorAll(selector)].filter(shown);
  const label = (e) => e.id || e.dataset.command || e.dataset.camera || e.textContent.trim() || e.tagName;
  const inside = ({ left, top, right, bottom }) => left >= -0.5 && top >= -0.5 && right <= innerWidth + 0.5 && bottom <= innerHeight + 0.5;

  const together = ["#instruction", "#deadman", "#pad-left", "#pad-right", "#stop", ".camera"];
  for (const selector of together) if (!all(selector).length) wrong.push(`${selector} is not shown`);
  for (const e of together.flatMap(all)) {
    const box = e.getBoundingClientRect();
    const hit = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
    if (!inside(box)) wrong.push(`${label(e)} is outside the screen`);
    if (!e.contains(hit)) wrong.push(`${label(e)} is covered by ${hit && label(hit)}`);
  }
  for (const e of all("button, input, .pad")) {
    const { width, height } = (e.closest("label") ?? e).getBoundingClientRect();
    if (width < 44 || height < 44) wrong.push(`${label(e)} is ${width} x ${height}`);
    if (e.scrollWidth > e.clientWidth && e.tagName === "BUTTON") wrong.push(`${label(e)} is cut off`);
    const name = e.getAttribute("aria-label") ?? (e.closest("label") ?? e).textContent;
    if (!name.trim()) wrong.push(`${label(e)} has no name`);
  }
  for (const e of all(".phase, .task")) if (e.scrollHeight > e.clientHeight + 1) wrong.push(`${e.className} is cut off: ${e.textContent}`);
  const root = document.scrollingElement;
  if (root.scrollWidth > innerWidth || root.scrollHeight > innerHeight) wrong.push("the page scrolls");
  for (const e of all("body > *:not(dialog)")) if (!inside(e.getBoundingClientRect()) && e.id !== "banner") wrong.push(`${label(e)} overflows`);

  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  if (new Set(ids).size < ids.length) wrong.push("an id is there twice");
  if (document.documentElement.lang !== "en" || !document.title) wrong.push("no language or title");
  if (all("[tabindex]").some((e) => e.tabIndex > 0)) wrong.push("an order of focus of its own");

  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const over = (below, colour) => {
    pen.fillStyle = `rgb(${below.join(" ")})`;
    pen.fillRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const ground = (e) => (e ? over(ground(e.parentElement), getComputedStyle(e).backgroundColor) : [255, 255, 255]);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  for (const e of all("body *").filter((x) => [...x.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))) {
    if (e.closest(":disabled, #toast:not(.on)")) continue;
    const style = getComputedStyle(e), below = ground(e);
    const [dark, bright] = [light(below), light(over(below, style.color))].sort((a, b) => a - b);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    const contrast = (bright + 0.05) / (dark + 0.05);
    if (contrast < (large ? 3 : 4.5)) wrong.push(`${label(e)}: contrast ${contrast.toFixed(1)}`);
  }
  return wrong;
}
