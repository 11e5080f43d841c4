"""What the doctor says as messages, and back."""

from __future__ import annotations

from dataclasses import asdict

from kvstore.doctor import Cause, Finding, Report
from kvstore.transport.convert import duration_seconds, set_duration
from kvstore.v1 import admin_service_pb2 as admin_pb


def report_to_proto(report: Report) -> admin_pb.GetDiagnosisResponse:
    """All that was found."""
    message = admin_pb.GetDiagnosisResponse(
        requests=report.requests,
        skipped=report.skipped,
        causes={cause.value: count for cause, count in report.causes.items()},
        findings=[admin_pb.Finding(**{**asdict(one), "cause": one.cause.value}) for one in report.findings],
    )
    set_duration(message.counted, report.seconds, "seconds")
    return message


def report_from_proto(message: admin_pb.GetDiagnosisResponse) -> Report:
    """All that was found; causes that this release does not know are left out."""
    known = {cause.value: cause for cause in Cause}
    return Report(
        duration_seconds(message.counted),
        message.requests,
        message.skipped,
        {known[name]: count for name, count in message.causes.items() if name in known},
        tuple(_finding(one, known[one.cause]) for one in message.findings if one.cause in known),
    )


def _finding(message: admin_pb.Finding, cause: Cause) -> Finding:
    return Finding(
        message.tenant,
        message.model,
        cause,
        message.parted_at,
        message.block,
        message.requests,
        message.share,
        message.tokens_per_day,
        message.advice,
    )
