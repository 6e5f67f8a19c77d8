// Draws the page's plots in the colours of its style sheet, and again when dark and light change.
"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;

  function colour(name) {
    const style = getComputedStyle(document.documentElement);
    return style.getPropertyValue("--" + (/^\d$/.test(name) ? "c" + name : name)).trim();
  }

  function coloured(value) {
    if (typeof value === "string") return /^@[\w-]+$/.test(value) ? colour(value.slice(1)) : value;
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(coloured) : value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, ["x", "y", "name"].includes(k) ? v : coloured(v)]));
    }
    return value;
  }

  function axis(own) {
    return {
      gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true,
      ...coloured(own || {}),
    };
  }

  function draw() {
    for (const { name, traces, layout } of plots) {
      const own = coloured(layout);
      Plotly.react(
        name,
        traces.map(coloured),
        {
          paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
          font: { color: colour("text"), family: "system-ui, sans-serif", size: 13 },
          margin: { l: 55, r: 12, t: 30, b: 45 }, hovermode: "x unified",
          hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") } },
          legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0 },
          dragmode: touch ? false : "zoom",
          ...own, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
        },
        { responsive: true, displayModeBar: false },
      );
    }
    Object.assign(document.documentElement.dataset, { plots: plots.length, dark: dark.matches });
  }

  draw();
  dark.addEventListener("change", draw);
})();
