from __future__ import annotations

from tests.ops.descriptors import ambiguous

LOST = """
        /*0000*/                   UMOV UR18, UR4 ;   /* 0x0 */
        /*0010*/                   UMOV UR19, UR5 ;
        /*0020*/                   UMOV UR16, UR6 ;
        /*0030*/                   UMOV UR17, UR7 ;
        /*0040*/              @P0 BRA 0x70 ;
        /*0050*/                   UIADD3.64 UR16, UR8, 0x80, URZ ;
        /*0060*/                   BRA 0x70 ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16].tnspA, R24, gsb0 ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R88, R200, gdesc[UR16].tnspB, R88 ;
        /*0090*/               @P1 BRA 0x40 ;
        /*00a0*/                   EXIT ;
"""


def test_products_that_read_what_one_branch_alone_writes() -> None:
    found = ambiguous(LOST)
    assert [line.split(" ")[0] for line in found] == ["0x70", "0x70"]
    assert "UR16 comes from 0x20, 0x50" in found[0]
    assert "UR17 comes from 0x30, 0x50" in found[1]


def test_blocks_that_are_set_before_each_product() -> None:
    kept = LOST.replace("UIADD3.64 UR16, UR8", "UIADD3.64 UR20, UR8")
    assert ambiguous(kept) == []
    # Set where the branches have met again, for each product.
    assert (
        ambiguous(
            LOST.replace("BRA 0x70", "BRA 0x68").replace(
                "/*0070*/", "/*0068*/ UIADD3.64 UR16, UR8, 0x0, URZ ;\n /*0070*/"
            )
        )
        == []
    )


def test_a_predicate_may_leave_the_value_of_before() -> None:
    text = LOST.replace("/*0060*/                   BRA 0x70 ;", "/*0060*/ @UP0 UMOV UR18, UR9 ;")
    assert any("UR18 comes from 0x0, 0x60" in line for line in ambiguous(text))
