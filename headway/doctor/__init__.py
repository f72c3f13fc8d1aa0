"""What slows a run down or spoils it, from its numbers: evidence in, findings out. Pure."""

from headway.doctor.evidence import Evidence
from headway.doctor.finding import Finding, Severity
from headway.doctor.rules import RULES, diagnose

__all__ = ["RULES", "Evidence", "Finding", "Severity", "diagnose"]
