"""Dashboards and rules as code, built from the metric catalogue of ``loadpeak_exporter``."""
