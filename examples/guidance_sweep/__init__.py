"""The guidance sweep: an image product's reference under a grid of guidance settings, judged by the gate's own rule."""
