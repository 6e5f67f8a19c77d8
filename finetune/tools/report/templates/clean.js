// Keeps the decisions about the problems, also when the page is opened again, and gives them as a file.
"use strict";
(() => {
  const problems = [...document.querySelectorAll(".problem")];
  const counter = document.getElementById("counter");
  const words = { keep: "kept", drop: "dropped", take: "text taken" };

  const place = `decisions of ${location.pathname}`;
  const order = [];  // the problems that were decided, the latest last

  function remember() {
    const rows = problems.filter((p) => p.dataset.decision)
      .map((p) => [p.dataset.source, [p.dataset.decision, p.dataset.correction]]);
    try { localStorage.setItem(place, JSON.stringify(Object.fromEntries(rows))); } catch { /* it has no storage */ }
  }

  function recall() {
    let rows;
    try { rows = JSON.parse(localStorage.getItem(place)) || {}; } catch { return; }
    for (const problem of problems) {
      const [decision, correction] = rows[problem.dataset.source] || [];
      if (words[decision] && correction === problem.dataset.correction) decide(problem, decision);
    }
  }

  function undo(here) {
    const problem = here.dataset.decision ? here : order.filter((p) => p.dataset.decision).pop();
    if (!problem) return;
    decide(problem, "");
    go(problem, 0);
  }

  function decide(problem, decision) {
    if (decision === "take" && !problem.dataset.correction) return;
    if (decision) problem.dataset.decision = decision;
    else delete problem.dataset.decision;
    for (const button of problem.querySelectorAll("[data-decision]")) {
      button.setAttribute("aria-pressed", String(button.dataset.decision === decision));
    }
    problem.querySelector(".said").textContent = words[decision] || "";
    counter.textContent = `${problems.filter((p) => p.dataset.decision).length} of ${problems.length} decided`;
    order.push(problem);
    remember();
  }

  function go(from, step) {
    const next = problems[problems.indexOf(from) + step];
    if (!next) return;
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "center" });
  }

  function download() {
    const lines = problems.filter((p) => p.dataset.decision).map((p) => {
      const row = { source: p.dataset.source, id: p.dataset.id, decision: p.dataset.decision };
      if (row.decision === "take") row.text = p.dataset.correction;
      return JSON.stringify(row) + "\n";
    });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
    link.download = "decisions.jsonl";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-decision]");
    if (!button) return;
    const problem = button.closest(".problem");
    decide(problem, problem.dataset.decision === button.dataset.decision ? "" : button.dataset.decision);
  });
  document.getElementById("download").addEventListener("click", download);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !problems.length) return;
    const here = event.target.closest(".problem");
    const decision = { k: "keep", d: "drop", t: "take" }[event.key];
    if (event.key === "j" || event.key === "ArrowDown") here ? go(here, 1) : problems[0].focus();
    else if (event.key === "ArrowUp" && here) go(here, -1);
    else if (event.key === " " && here === event.target) {
      const audio = here.querySelector("audio");
      if (audio) audio.paused ? audio.play() : audio.pause();
    } else if (event.key === "u" && here) undo(here);
    else if (decision && here) {
      decide(here, decision);
      go(here, 1);
    } else return;
    event.preventDefault();
  });
  recall();
  if (problems.length) problems[0].focus({ preventScroll: true });
})();
