"""What report and MLflow show of kind `vision`."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.products.vision.settings import VisionProduct
from pipeline.report.presenting import Plot


class VisionPresenter:
    """What is shown of kind `vision`."""

    def list_plots(self, product: VisionProduct) -> Mapping[str, Plot]:
        """Return the worst pictures, the error of each layer, and what the task adds."""
        from pipeline.products.images.show.plots import plot_worst_images
        from pipeline.products.vision.show.pictures import plot_found, plot_seams
        from pipeline.products.vision.show.plots import plot_buckets, plot_layers

        if product.task == "detection":
            return {
                "buckets.png": lambda compared, path: plot_buckets(compared.judgement, path),
                "worst.png": plot_found,
                "layers.png": plot_layers,
            }
        return {"worst.png": plot_worst_images, "seams.png": plot_seams, "layers.png": plot_layers}
