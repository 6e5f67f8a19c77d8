"""report.html, the page that a run leaves, and pages that lay runs side by side."""
