"""What generators for other languages need of the protos; they are not installed where we test."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from drafthouse.v1 import admin_pb2, errors_pb2, generation_pb2, model_pb2, usage_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
FILES: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (admin_pb2, errors_pb2, generation_pb2, model_pb2, usage_pb2)
]


def test_the_files_are_all_that_there_are() -> None:
    found = {str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto")}
    assert found == {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_says_where_its_classes_belong(file: FileDescriptor) -> None:
    """Go's generator refuses a file without a package.

    In Objective-C all classes are beside each other, and `Model` may be an application's own.
    """
    options = file.GetOptions()
    assert options.go_package == "drafthouse.dev/go/drafthouse/v1;drafthousev1"
    assert (options.java_package, options.java_multiple_files) == ("dev.drafthouse.v1", True)
    assert options.objc_class_prefix == "DRH"


def test_the_page_about_other_languages_uses_their_names() -> None:
    page = (ROOT / "docs" / "clients.md").read_text("utf-8")
    options = FILES[0].GetOptions()
    assert f"import {options.java_package}.*;" in page
    assert f'\t{options.go_package.partition(";")[2]} "' in page


def test_no_class_of_a_file_has_the_name_of_a_message() -> None:
    """Kotlin's generator failed: `UsageKt.kt` twice, for usage.proto and for the message `Usage`.

    Without a name of its own, Java's class of a file is called as the file, and differs from the
    messages of that file alone.
    """
    classes = [file.GetOptions().java_outer_classname for file in FILES]
    named = {
        name.lower()
        for file in FILES
        for kind in (file.message_types_by_name, file.enum_types_by_name, file.services_by_name)
        for name in kind
    }
    assert all(classes)
    assert len({name.lower() for name in classes}) == len(FILES)
    assert not named & {name.lower() for name in classes}
