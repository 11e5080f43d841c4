"""The prefix doctor: where prompts leave what is stored, why, and what would make them hit. See README.md."""

from kvstore.doctor.causes import Cause, Diagnosis
from kvstore.doctor.doctor import Doctor
from kvstore.doctor.report import Finding, Report
from kvstore.doctor.seen import SeenLookup
from kvstore.doctor.watch import LookupWatch

__all__ = ["Cause", "Diagnosis", "Doctor", "Finding", "LookupWatch", "Report", "SeenLookup"]
