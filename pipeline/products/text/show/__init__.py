"""What report and MLflow show of kind `text`."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.products.text.settings import TextProduct
from pipeline.report.presenting import Plot


class TextPresenter:
    """What is shown of kind `text`."""

    def list_plots(self, product: TextProduct) -> Mapping[str, Plot]:
        """Return task completion by bucket, and speed."""
        from pipeline.report.plots import plot_completion, plot_speed

        return {
            "completion.png": lambda compared, path: plot_completion(compared.judgement, path),
            "speed.png": lambda compared, path: plot_speed(compared.judgement, path),
        }
