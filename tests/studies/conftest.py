"""What several tests of studies share."""

from __future__ import annotations

import pytest

from situs.studies.form import Study
from situs.studies.reading import StudyList, list_studies


@pytest.fixture(scope="session")
def listed() -> StudyList:
    """All studies of the package with their numbers: reading them takes seconds."""
    return list_studies()


@pytest.fixture(scope="session")
def every(listed: StudyList) -> dict[str, Study]:
    """All studies of the package, by name."""
    return {name: result.study for name, result in listed.studies.items()}
