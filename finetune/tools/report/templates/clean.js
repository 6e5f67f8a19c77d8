// Keeps the decisions about the problems, also when the page is opened again, and gives them as a file.
"use strict";
(() => {
  const problems = [...document.querySelectorAll(".problem")];
  const counter = document.getElementById("counter");
  const words = { keep: "kept", drop: "dropped", take: "text taken" };

  const place = `decisions of ${location.pathname}`;
  const order = [];  // the problems that were decided, the latest last
  const told = new Map(problems.map((p) => [p, {
    source: JSON.parse(p.dataset.source), id: JSON.parse(p.dataset.id), correction: JSON.parse(p.dataset.correction),
  }]));

  function stored() {
    try { return JSON.parse(localStorage.getItem(place)) || {}; } catch { return {}; }
  }

  function remember(problem) {  // this one only: another tab may have decided about others
    const rows = stored();
    const { source, correction } = told.get(problem);
    if (problem.dataset.decision) rows[source] = [problem.dataset.decision, correction];
    else delete rows[source];
    try { localStorage.setItem(place, JSON.stringify(rows)); } catch { /* it has no storage */ }
  }

  function recall() {
    const rows = stored();
    for (const problem of problems) {
      const { source, correction } = told.get(problem);
      const [decision, of] = rows[source] || [];
      const known = words[decision] && of === correction ? decision : "";
      if (known !== (problem.dataset.decision || "")) show(problem, known);
    }
  }

  function undo(here) {
    const problem = here.dataset.decision ? here : order.filter((p) => p.dataset.decision).pop();
    if (!problem) return;
    decide(problem, "");
    go(problem, 0);
  }

  function decide(problem, decision) {
    if (decision === "take" && !told.get(problem).correction) return;
    show(problem, decision);
    remember(problem);
  }

  function show(problem, decision) {
    if (decision) problem.dataset.decision = decision;
    else delete problem.dataset.decision;
    for (const button of problem.querySelectorAll("[data-decision]")) {
      button.setAttribute("aria-pressed", String(button.dataset.decision === decision));
    }
    problem.querySelector(".said").textContent = words[decision] || "";
    counter.textContent = `${problems.filter((p) => p.dataset.decision).length} of ${problems.length} decided`;
    order.push(problem);
  }

  function go(from, step) {
    const next = problems[problems.indexOf(from) + step];
    if (!next) return;
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "center" });
  }

  function download() {
    const lines = problems.filter((p) => p.dataset.decision).map((p) => {
      const { source, id, correction } = told.get(p);
      const row = { source, id, decision: p.dataset.decision };
      if (row.decision === "take") row.text = correction;
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
  addEventListener("storage", (event) => { if (event.key === place) recall(); });  // what other tabs decide
  recall();
  if (problems.length) problems[0].focus({ preventScroll: true });
})();
