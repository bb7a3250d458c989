"""The commands for the results of runs: `report`, `watch`, `evaluate`, `export`, `predict`."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedprior.cli.terminal import console
from fedprior.core.errors import SettingError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

SHOWN = 20

RunFolder = Annotated[Path, typer.Argument(help="A run's folder.")]
Client = Annotated[
    int | None,
    typer.Option("--personalise", metavar="CLIENT", help="A client's own model: its E-step from the final server."),
]
Best = Annotated[
    bool, typer.Option("--best", help="The best evaluation's model, of a run with --set keep=best, not the last.")
]

JobOption = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="FILE.py:FUNCTION",
        help="For a Flower run of your own model: the app's function that makes the job.",
    ),
]


def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, or folders of runs.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Also write PNG, SVG and PDF figures to this folder.")] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Also write the table as Markdown, LaTeX and CSV to this folder.")
    ] = None,
) -> None:
    """Write one HTML page about runs: table, plots, partition, settings, and how to repeat them."""
    from fedprior.report.write import write_report
    from fedprior.runs.repeat import repeat_command

    written, broken = write_report(folders, out, figures_to=figures, tables_to=tables, repeat=repeat_command)
    for one in broken:
        console.print(f"left out: {one.path}: {one.reason}", soft_wrap=True)
    for path in written:
        console.print(str(path), soft_wrap=True)


def watch_command(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of runs; it need not exist yet.")],
    once: Annotated[bool, typer.Option("--once", help="Show the current state, then exit.")] = False,
) -> None:
    """Follow runs that another process trains."""
    from fedprior.report.watch import watch

    watch(run, console, once=once)


def export_command(
    run: RunFolder,
    to: Annotated[Path, typer.Option(help="The folder for model.py, model.safetensors, model.onnx and model.json.")],
    personalise: Client = None,
    best: Best = False,
    job: JobOption = None,
    onnx: Annotated[bool | None, typer.Option(help="Whether to write model.onnx; if not given, when possible.")] = None,
    align: Annotated[
        int, typer.Option(min=1, help="In model.onnx, keep a convolution's input channels a multiple of this.")
    ] = 8,
) -> None:
    """Write the run's network without its closed units, as plain torch and as ONNX."""
    from fedprior.trained.export import export

    found = export(run, to, personalise=personalise, best=best, **_of_job(run, job), onnx=onnx, align=align)
    console.print(_sizes_table(found))
    console.print(f"milliseconds: {found['timing']}")
    units = ", ".join(f"{layer} {left} of {of}" for layer, (left, of) in found["units"].items())
    console.print(f"units left: {units or 'all'}")
    for name, compared in found["compared"].items():
        console.print(
            f"{name}: outputs equal the full network's to {compared['largest_difference']:.1e}, "
            f"and {compared['same_predictions']:,} of {compared['inputs']:,} predictions ({found['compared_on']})",
        )
    for note in found["notes"]:
        console.print(note)
    console.print(str(to))


def predict_command(
    model: Annotated[Path, typer.Argument(help="An exported model's folder; with --text, also a run's.")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="Images, folders of images, or .npy arrays.")] = None,
    text: Annotated[str | None, typer.Option(help="A text to continue, with a network of characters.")] = None,
    characters: Annotated[int, typer.Option(help="With --text, how many characters to add.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="With --text, how freely they are drawn; 0 takes the likeliest.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="With --text, the seed of the draws.")] = 0,
    personalise: Client = None,
    resize: Annotated[bool, typer.Option("--resize", help="Resize images of other sizes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write all predictions to this CSV file.")] = None,
) -> None:
    """Classify images or arrays with an exported model, or continue a text."""
    how = {"characters": characters, "temperature": temperature, "seed": seed, "personalise": personalise}
    if text is not None:
        if inputs or resize or out:
            raise SettingError("with --text there is nothing to classify: leave out inputs, --resize and --out")
        _continue(model, text, how)
        return
    if not inputs:
        raise SettingError("give images or arrays to classify, or --text with a text to continue")
    if how != {"characters": 200, "temperature": 0.8, "seed": 0, "personalise": None}:
        raise SettingError("--characters, --temperature, --seed and --personalise need --text")
    from fedprior.core.files import write_atomically
    from fedprior.report.table import Table
    from fedprior.trained.compact.predict import predict

    found = predict(model, inputs, resize=resize)
    rows = [[row.name, str(row.label), f"{row.probability:.3f}"] for row in found[:SHOWN]]
    console.print(Table(["input", "class", "probability"], rows, words=3).terminal())
    if len(found) > SHOWN:
        console.print(f"and {len(found) - SHOWN:,} more" + ("" if out else "; --out FILE writes all"))
    if out:
        lines = io.StringIO(newline="")
        writer = csv.writer(lines)
        writer.writerow(["input", "class", "probability"])
        writer.writerows(found)
        write_atomically(out, lines.getvalue())
        console.print(str(out))


def _continue(model: Path, text: str, how: dict[str, Any]) -> None:
    from fedprior.trained.continuation import continue_text

    console.print(continue_text(model, text, **how), markup=False, highlight=False, soft_wrap=True)


def evaluate_command(
    run: RunFolder,
    data: Annotated[
        Path | None,
        typer.Option(help="An .npz with x and y, or a folder with one folder of images per class; else the run's own."),
    ] = None,
    personalise: Client = None,
    best: Best = False,
    job: JobOption = None,
) -> None:
    """Measure a run's network and, with --personalise, one client's own next to it."""
    from fedprior.report.table import Table
    from fedprior.trained.export import evaluate

    found = evaluate(run, data=data, personalise=personalise, best=best, **_of_job(run, job))
    names = [name for name in found if name not in ("title", "examples", "accuracy", "loss", "by_class", "server")]
    header, rows = ["model", "examples", "accuracy", "loss", *names], []
    models = [(found["title"], found)] + ([("the server's, on the same", found["server"])] if "server" in found else [])
    for name, row in models:
        accuracy = f"{100 * row['accuracy']:.2f}%" if "accuracy" in row else "–"
        own = (f"{row[metric]:.4g}" for metric in names)
        rows.append([name, f"{found['examples']:,}", accuracy, f"{row['loss']:.4f}", *own])
    console.print(Table(header, rows, words=len(header)).terminal())
    if "by_class" not in found:
        return
    classes = [[str(label), str(n), str(of), f"{100 * n / of:.1f}%"] for label, (n, of) in found["by_class"].items()]
    console.print(Table(["class", "right", "of", "accuracy"], classes, words=4).terminal())


def _of_job(run: Path, function: str | None) -> dict[str, Any]:
    """The task and algorithm of a Flower run whose app made its job with this function."""
    if function is None:
        return {}
    from fedprior.flower.resumed import job_of, task_of
    from fedprior.runs.folder import RunFolder

    job = job_of(RunFolder(run), function)
    return {"task": task_of(job), "algorithm": job.algorithm}


def _sizes_table(found: dict[str, Any]) -> "RichTable":
    """A table of sizes before and after, and their ratio."""
    from fedprior.report.table import Table

    kinds = [("", "dense", "compact")]
    if "dense onnx" in found["sizes"]:
        kinds.append(("ONNX ", "dense onnx", "compact onnx"))
    rows = []
    names = {"parameters": "{:,}", "bytes": "{:,}", "multiply_adds": "{:,}", "milliseconds": "{:.2f}"}
    for prefix, dense, small in kinds:
        before, after = found["sizes"][dense], found["sizes"][small]
        for name, form in names.items():
            sizes = [form.format(before[name]), form.format(after[name]), f"{after[name] / before[name]:.1%}"]
            rows.append([prefix + name.replace("_", "-"), *sizes])
    return Table(["", "dense", "compact", "left"], rows, found["title"]).terminal()


COMMANDS = (report_command, watch_command, evaluate_command, export_command, predict_command)
