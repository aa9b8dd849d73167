"""Pictures that several kinds of products show: read with the digest that was judged, set side by side, drawn."""
