"""The one place that composes everything: a config, a recipe, the loop, and the record of a run."""
