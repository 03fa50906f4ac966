"""`headrace report`: one HTML file about a run, from its files alone. gather reads, charts draw, page puts together."""

from app.offline.report.gather import Report, gather
from app.offline.report.page import page

__all__ = ["Report", "gather", "page"]
