"""Names the packages of a wheel, with configs/, workflow/ and pages of docs/; pyproject.toml says everything else."""

from setuptools import find_namespace_packages, setup

SHIPPED = ["mcore_mas.shipped.configs", "mcore_mas.shipped.docs", "mcore_mas.shipped.workflow"]

setup(packages=[*find_namespace_packages(include=["mcore_mas*"]), *SHIPPED])
