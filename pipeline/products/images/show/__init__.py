"""What report and MLflow show of kind `images`."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.products.images.settings import ImagesProduct
from pipeline.report.presenting import Plot


class ImagesPresenter:
    """What is shown of kind `images`."""

    def list_plots(self, product: ImagesProduct) -> Mapping[str, Plot]:
        """Return the worst images, the headroom of the decoders, and guidance."""
        from pipeline.products.images.show.guidance import plot_guidance
        from pipeline.products.images.show.plots import plot_headroom, plot_worst_images

        return {"worst.png": plot_worst_images, "headroom.png": plot_headroom, "guidance.png": plot_guidance}
