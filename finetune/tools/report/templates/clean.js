// Keeps the decisions about the problems, and gives them as a file.
"use strict";
(() => {
  const problems = [...document.querySelectorAll(".problem")];
  const counter = document.getElementById("counter");
  const words = { keep: "kept", drop: "dropped", take: "text taken" };

  function decide(problem, decision) {
    if (decision === "take" && !problem.dataset.correction) return;
    if (decision) problem.dataset.decision = decision;
    else delete problem.dataset.decision;
    for (const button of problem.querySelectorAll("[data-decision]")) {
      button.setAttribute("aria-pressed", String(button.dataset.decision === decision));
    }
    problem.querySelector(".said").textContent = words[decision] || "";
    counter.textContent = `${problems.filter((p) => p.dataset.decision).length} of ${problems.length} decided`;
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
    const decision = { k: "keep", d: "drop", t: "take", u: "" }[event.key];
    if (event.key === "j" || event.key === "ArrowDown") here ? go(here, 1) : problems[0].focus();
    else if (event.key === "ArrowUp" && here) go(here, -1);
    else if (event.key === " " && here === event.target) {
      const audio = here.querySelector("audio");
      if (audio) audio.paused ? audio.play() : audio.pause();
    } else if (decision !== undefined && here) {
      decide(here, decision);
      if (decision) go(here, 1);
      return;
    } else return;
    event.preventDefault();
  });
  if (problems.length) problems[0].focus({ preventScroll: true });
})();
