"""The page that `python -m finetune.check` leaves: tables, and histograms as pictures inside of it."""

import base64
import io
from pathlib import Path
from typing import Any

from finetune.tools.data_check.texts import name_of

PAGE = """\
{%- macro table(heads, rows) %}
{% if rows %}<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows -%}
<tr>{% for value in row %}<td{{ "" if loop.first else " class=number" }}>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table>{% else %}<p>none</p>{% endif %}
{%- endmacro -%}
<!doctype html><html lang="en"><meta charset="utf-8"><title>Check</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.9rem 0.25rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
</style>
<h1>Check of a data set</h1>
<p>{{ rows }} rows; {{ clips }} clips to train on, {{ "%.2f" % hours }} hours. {{ bad }} bad clips
({{ "%.2f" % (100 * bad_fraction) }} %; at most {{ "%g" % (100 * max_bad_fraction) }} % are allowed),
{{ filtered.values() | sum }} left out by filters, {{ duplicate_ids }} with an id that came before.</p>
{% for error in errors %}<p><b>{{ error }}</b></p>{% endfor %}
<h2>Hours by language</h2>{{ table(("language", "clips", "hours"), languages) }}
<h2>What would be left out</h2>{{ table(("reason", "clips", "such as"), left_out) }}
<h2>What cannot be used</h2>{{ table(("reason", "clips", "such as"), bad_ones) }}
<h2>What is suspicious</h2>{{ table(("what", "clips", "such as"), doubtful) }}
<p>suspicious.jsonl lists these clips and those whose texts look wrong, after the lines of problems.jsonl.</p>
{% for line in same_clips + same_texts %}<p><b>{{ line }}</b></p>{% endfor %}
<p>problems.jsonl lists each clip; `data.leave_out` takes it.</p>
{% for language, own in texts.items() %}<h2>Texts: {{ language }}</h2>
{{ table(("what looks wrong", "texts", "such as"), own.suspicious) }}
{{ table(("character", "times", "such as"), own.rows) }}
{% if own.deleted %}{{ table(("taken out by data.text_normalization", "times"), own.deleted.items()) }}{% endif %}
{% endfor %}<h2>Files</h2>{{ table(("sample rate, Hz", "clips"), sample_rates.items()) }}
{{ table(("channels", "clips"), channels.items()) }}
<h2>Padding of training batches, estimated</h2>{{ table(("batches", "share of the audio"), shares) }}
<h2>Lengths and levels</h2>
<img alt="histograms" src="data:image/png;base64,{{ picture }}">
</html>
"""


def write_report(found: dict[str, Any], path: Path) -> None:
    """Write the page, which needs no other file, from what `inspection.inspect` returns."""
    import jinja2

    seconds = sorted(found["seconds_by_language"].items(), key=lambda item: -item[1])
    texts = {
        language: own | {"rows": [(name_of(c), n, own["examples"].get(c, "")) for c, n in own["characters"].items()]}
        for language, own in found["texts"].items()
    }
    page = jinja2.Environment(autoescape=True).from_string(PAGE)
    text = page.render(
        **(found | {"texts": texts}),
        languages=[(name, found["clips_by_language"][name], f"{total / 3600:.2f}") for name, total in seconds],
        bad_ones=[(kind, n, found["examples"][kind]) for kind, n in found["problems"].items()],
        doubtful=[(kind, n, found["examples"][kind]) for kind, n in found["doubts"].items()],
        shares=[(name, f"{100 * share:.1f} %") for name, share in found["padding"].items()],
        picture=_histograms(found["histograms"]),
    )
    path.write_text(text, encoding="utf-8")


def _histograms(histograms: dict[str, dict[str, Any]]) -> str:
    """Draw all histograms as a PNG in base64."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    fig, axes = plt.subplots(2, 2, figsize=(11, 6), layout="constrained")
    for axis, (name, histogram) in zip(axes.flat, histograms.items(), strict=True):
        edges = np.linspace(histogram["from"], histogram["to"], len(histogram["counts"]) + 1)
        axis.stairs(histogram["counts"], edges, fill=True, color="#4477aa")
        axis.set_xlabel(name)
        axis.set_ylabel("clips")
        axis.grid(alpha=0.3)
    file = io.BytesIO()
    fig.savefig(file, dpi=90)
    plt.close(fig)
    return base64.b64encode(file.getvalue()).decode()
