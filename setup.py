"""Names the packages of a wheel, with configs/, workflow/ and pages of docs/; pyproject.toml has all other settings."""

from setuptools import find_namespace_packages, setup

PACKAGES = ["mcore_mas*", "rollout*", "retrieval*"]
SHIPPED = ["mcore_mas.shipped.configs", "mcore_mas.shipped.docs", "mcore_mas.shipped.workflow"]

setup(packages=[*find_namespace_packages(include=PACKAGES), *SHIPPED])
