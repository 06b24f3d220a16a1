"""Report: the page of a release, beside the release that its channel holds."""

from collections.abc import Mapping
from typing import Any

from tasks.gate import GateJob, check_figures
from tasks.insight import Insight
from tasks.step import Job, Step, StepRunner
from tvmflow.documents.encoding import narrow
from tvmflow.documents.release import Release
from tvmflow.documents.verdict import Check
from tvmflow.promotion import people, policies
from tvmflow.report import insight as report_insight
from tvmflow.report.layers import fetch_times
from tvmflow.report.release import write_page
from tvmflow.report.release_data import make_data
from tvmflow.spec import Spec
from tvmflow.store import ReleaseStore, channels
from tvmflow.workspace import Artifact, StepResult

PAGE = "report.html"
"""The artifact of a release's run that holds the page."""
# The channel whose release a new one is compared with, if the release file names it, and the releases of the history.
_CHANNEL, _HISTORY = "production", 30


class ReportJob(Job):
    """A release without its report, the releases before it, and the insights by target.

    The release is compared with `production`, the release that `channel` holds; None where the channel holds nothing or
    its release is not in `history`. `checks` are those of the channel's gates on figures. `layers_before` are the ms of
    production's layers by target and name, empty where its page has none.
    """

    release: Release
    channel: str
    production: Release | None
    history: tuple[Release, ...]
    insights: dict[str, Insight]
    checks: tuple[Check, ...]
    layers_before: dict[str, dict[str, float]]

    def cache_key(self) -> Mapping[str, Any]:
        """Return the release and the texts of its samples, which may fail in one run and not in the next.

        The page stays the same when later releases and moves change all else.
        """
        texts = {
            target: [item.problem, *(sample.text for sample in (*item.worst, *item.flipped))]
            for target, item in self.insights.items()
        }
        return {"release": self.release, "texts": texts}

    @classmethod
    def of(cls, spec: Spec, store: ReleaseStore, release: Release, insights: Mapping[str, Insight]) -> "ReportJob":
        """Return the job that reports on a release which is not published yet. Raises StoreError."""
        channel = _CHANNEL if _CHANNEL in spec.channels or not spec.channels else list(spec.channels)[-1]
        versions = [version for version in store.list_versions(spec.name) if version != release.version]
        history = tuple(store.get_release(spec.name, version) for version in versions[-_HISTORY:])
        destination = channels.find(store, spec.name, channel)
        production = next((document for document in history if document.version == destination.version), None)
        policy = policies.find_policy(destination, release, production, who=people.identify_user())
        checks = tuple(
            check_figures(GateJob(release=release, destination=destination, policy=policy, current=production))
        )
        return cls(
            release=release,
            channel=channel,
            production=production,
            history=history,
            insights=dict(insights),
            checks=checks,
            layers_before={} if production is None else fetch_times(production.report, store.get_blob),
        )


class ReportResult(StepResult):
    """The page, an HTML file."""

    page: Artifact


def work(job: ReportJob, runner: StepRunner) -> ReportResult:
    """Write the page of a release and return it."""
    insights = {name: narrow(report_insight.Insight, item) for name, item in job.insights.items()}
    data = make_data(job.release, job.channel, job.production, job.history, insights, job.checks, job.layers_before)
    with runner.workspace.scratch() as folder:
        (folder / PAGE).write_text(write_page(data))
        return ReportResult(page=runner.workspace.keep(folder / PAGE))


report = Step("report", ReportResult, work)
