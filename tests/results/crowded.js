// What of a chart's texts runs into another one: by the browser's own measures.
const meet = (one, other) =>
  Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1.5 &&
  Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3;
const crowded = page => {
  const found = [];
  for (const svg of shownIn(page, "figure.chart svg")) {
    const texts = [...svg.querySelectorAll("text")].map(each => [each.textContent, box(each)]);
    texts.forEach(([words, place], index) => {
      for (const [others, beside] of texts.slice(index + 1)) if (meet(place, beside)) found.push(`${words} | ${others}`);
    });
  }
  return found;
};
