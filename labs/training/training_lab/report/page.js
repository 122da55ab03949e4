"use strict";

// Puts charts that answer the pointer in the place of the still pictures, from the same specifications.
(() => {
  const source = JSON.parse(document.getElementById("charts").textContent);
  const places = [...document.querySelectorAll("[data-chart]")];
  const root = document.documentElement;
  let drawing = Promise.resolve();

  // Columns of values as the rows that Vega-Lite takes.
  const rowsOf = (columns) => {
    const names = Object.keys(columns);
    return columns[names[0]].map((_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]])));
  };

  // A specification over another horizontal axis: `update` is what all of them are written with.
  const over = (spec, axis) => {
    const changed = structuredClone(spec);
    for (const { encoding } of changed.layer) {
      if (encoding.x && encoding.x.field === "update") {
        Object.assign(encoding.x, { field: axis, title: source.axes[axis], axis: { ...encoding.x.axis } });
        if (encoding.x2) encoding.x2.field = `${axis}_end`;
      }
    }
    return changed;
  };

  const draw = async (place, axis) => {
    const chart = source.charts[place.dataset.chart];
    const spec = chart.has_axes ? over(chart.spec, axis) : structuredClone(chart.spec);
    const datasets = Object.fromEntries(Object.entries(chart.data).map(([name, columns]) => [name, rowsOf(columns)]));
    const before = [...place.childNodes];
    place.style.minHeight = `${place.offsetHeight}px`;
    try {
      await vegaEmbed(place, { ...spec, width: "container", datasets, config: source.config }, {
        mode: "vega-lite",
        renderer: "svg",
        actions: false,
        ast: true, // expressions are interpreted: the page may evaluate nothing
        defaultStyle: false,
        tooltip: { disableDefaultStyle: true },
      });
    } catch (error) {
      place.replaceChildren(...before); // the still picture says the same
      console.warn(`the chart ${place.dataset.chart} stays still: ${error.message}`);
    }
    place.style.minHeight = "";
  };

  // One after the other, with room between them for the person's own doing.
  const drawAll = (wanted, axis) => {
    root.dataset.charts = "drawing";
    drawing = drawing.then(async () => {
      for (const place of wanted) {
        await draw(place, axis);
        await new Promise((resume) => setTimeout(resume));
      }
      root.dataset.charts = axis;
    });
  };

  root.classList.add("scripted");
  const choices = [...document.querySelectorAll("input[name=axis]")];
  const chosen = () => (choices.find((choice) => choice.checked) || { value: "update" }).value;
  const curves = places.filter((place) => source.charts[place.dataset.chart].has_axes);
  for (const choice of choices) choice.addEventListener("change", () => drawAll(curves, chosen()));
  drawAll(places, chosen());
})();
