"""What MLflow shows of a judgement: runs, tables, images, and registered versions."""
