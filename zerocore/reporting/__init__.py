"""Reports the time and bytes of training steps, and explains out-of-memory errors."""

from zerocore.reporting.description import Description
from zerocore.reporting.events import Event
from zerocore.reporting.out_of_memory import OutOfMemory, explain_out_of_memory
from zerocore.reporting.recording import record_events
from zerocore.reporting.report import Report
from zerocore.reporting.timeline import Timeline

__all__ = [
    "Description",
    "Event",
    "OutOfMemory",
    "Report",
    "Timeline",
    "explain_out_of_memory",
    "record_events",
]
