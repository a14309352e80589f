// Does the schedule cover every tile and every row exactly once, whatever the routing? Host program, exit code 0 = yes.
//
//   schedule_check             runs all checks
//   schedule_check layout ...  prints the workspace offsets for seven numbers, for comparison with the Python mirror
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "perseus/common/params.cuh"
#include "perseus/layout/workspace.cuh"
#include "perseus/schedule/router_items.cuh"
#include "perseus/schedule/worklist.cuh"

using namespace perseus;

#define REQUIRE(condition, ...)                                           \
    do {                                                                  \
        if (!(condition)) {                                               \
            std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            std::fprintf(stderr, __VA_ARGS__);                            \
            std::fprintf(stderr, "\n");                                   \
            std::exit(1);                                                 \
        }                                                                 \
    } while (0)

// What the device's sort leaves behind, computed the simple way.
std::vector<TokenBlock> block_list(const std::vector<u32>& rows_of_expert, u32 max_tokens) {
    std::vector<TokenBlock> list;
    u32 first_row = 0;
    for (u32 expert = 0; expert < rows_of_expert.size(); ++expert) {
        const u32 rows = rows_of_expert[expert];
        const u32 first_block = static_cast<u32>(list.size());
        for (u32 block = 0; block < blocks_of(rows, max_tokens); ++block) {
            list.push_back({expert, first_row, rows, first_block});
        }
        first_row += rows;
    }
    return list;
}

void check_tiles(const std::vector<u32>& rows_of_expert, u32 max_tokens, const TileShape& shape_in) {
    const std::vector<TokenBlock> blocks = block_list(rows_of_expert, max_tokens);
    u32 num_rows = 0;
    for (u32 rows : rows_of_expert) num_rows += rows;
    REQUIRE(blocks.size() <= max_blocks(num_rows, rows_of_expert.size(), max_tokens), "%zu blocks of %u rows",
            blocks.size(), num_rows);
    TileShape shape = shape_in;
    shape.num_blocks = static_cast<u32>(blocks.size());
    std::vector<u32> gemm1(num_rows * shape.hidden_tiles);
    std::vector<u32> gemm2(num_rows * shape.out_tiles);
    std::vector<u32> stored(shape.num_blocks);             // GEMM 1 tiles seen so far, per block
    std::vector<u32> summable(shape.num_groups);           // GEMM 2 tiles seen so far, per column group
    std::vector<u32> combined(shape.num_groups * shape.num_combine_items);
    u32 index = 0;
    for (;; ++index) {
        const QueueItem item = decode_queue_index(shape, index);
        if (item.kind == TileKind::kEnd) break;
        if (item.kind == TileKind::kCombine) {
            REQUIRE(summable[item.group] == shape.num_blocks * shape.group_tiles(item.group),
                    "combine of group %u before its products", item.group);
            ++combined[item.group * shape.num_combine_items + item.index];
            continue;
        }
        const bool is_gemm1 = item.kind == TileKind::kGemm1;
        const u32 weight_tiles = is_gemm1 ? shape.hidden_tiles : shape.group_tiles(item.group);
        GemmTile tile = decode_gemm_tile(blocks[item.index / weight_tiles], item.index, weight_tiles, max_tokens);
        if (!is_gemm1) tile.weight_tile += shape.group_begin(item.group);
        REQUIRE(tile.num_rows >= 1 && tile.num_rows <= max_tokens, "%u rows", tile.num_rows);
        REQUIRE(tile.block < shape.num_blocks && blocks[tile.block].expert == tile.expert, "block %u", tile.block);
        REQUIRE(tile.first_row >= blocks[tile.block].first_row &&
                    tile.first_row + tile.num_rows <= blocks[tile.block].first_row + blocks[tile.block].num_rows,
                "rows %u + %u outside their expert", tile.first_row, tile.num_rows);
        if (is_gemm1) {
            ++stored[tile.block];
        } else {
            REQUIRE(stored[tile.block] == shape.hidden_tiles, "GEMM 2 of block %u before its GEMM 1", tile.block);
            ++summable[item.group];
        }
        for (u32 row = tile.first_row; row < tile.first_row + tile.num_rows; ++row) {
            if (is_gemm1) ++gemm1[row * shape.hidden_tiles + tile.weight_tile];
            else ++gemm2[row * shape.out_tiles + tile.weight_tile];
        }
    }
    for (u32 count : gemm1) REQUIRE(count == 1, "a row and weight tile of GEMM 1 %u times", count);
    for (u32 count : gemm2) REQUIRE(count == 1, "a row and weight tile of GEMM 2 %u times", count);
    for (u32 count : combined) REQUIRE(count == 1, "a combine item %u times", count);
    for (u32 past = 0; past < 3; ++past) {
        REQUIRE(decode_queue_index(shape, index + past).kind == TileKind::kEnd, "work after the end");
    }
}

void check_routings() {
    std::mt19937 random(7);
    for (u32 round = 0; round < 400; ++round) {
        const u32 max_tokens = std::vector<u32>{8, 16, 32, 64, 128}[random() % 5];
        const u32 experts = 1 + random() % 40;
        const u32 most = std::vector<u32>{1, 9, 130, 700}[random() % 4];
        std::vector<u32> rows(experts);
        for (u32& count : rows) count = random() % 3 == 0 ? 0 : random() % (most + 1);
        if (round % 5 == 0) {  // all to one expert
            rows.assign(experts, 0);
            rows[random() % experts] = 1 + random() % 2000;
        }
        const u32 out_tiles = 1 + random() % 9;
        const u32 groups = 1 + random() % smaller(out_tiles, kMaxColumnGroups);
        const u32 tokens = random() % 3000;
        const u32 hidden_tiles = 1 + random() % 7;
        check_tiles(rows, max_tokens, {0, hidden_tiles, out_tiles, combine_items(tokens, groups), groups});
    }
    check_tiles({}, 16, {0, 3, 4, 0, 1});
    check_tiles({0, 0, 0}, 16, {0, 3, 4, combine_items(5, 1), 1});
}

void check_blocks() {
    for (u32 max_tokens : {8u, 16u, 32u, 64u, 128u}) {
        for (u32 rows = 1; rows < 3000; ++rows) {
            const u32 step = rows_per_block(rows, max_tokens);
            REQUIRE(step % 8 == 0 && step <= max_tokens, "%u rows in blocks of %u", rows, step);
            REQUIRE((blocks_of(rows, max_tokens) - 1) * step < rows, "empty block: %u rows by %u", rows, step);
            REQUIRE(blocks_of(rows, max_tokens) * step >= rows, "left over: %u rows in blocks of %u", rows, step);
        }
    }
}

void check_sort_chunks() {
    for (u32 rows : {0u, 1u, 31u, 32u, 1024u, 1025u, 8192u, 65536u, 65537u, 1048576u, 4194304u}) {
        const SortChunks chunks = sort_chunks(rows);
        REQUIRE(chunks.num_chunks >= 1 && chunks.num_chunks <= kMaxSortChunks, "%u chunks", chunks.num_chunks);
        REQUIRE(static_cast<u64>(chunks.num_chunks) * chunks.rows_per_chunk >= rows, "%u rows", rows);
        REQUIRE(rows == 0 || static_cast<u64>(chunks.num_chunks - 1) * chunks.rows_per_chunk < rows,
                "an empty chunk: %u rows", rows);
    }
}

void check_combine() {
    for (u32 groups = 1; groups <= kMaxColumnGroups; ++groups) {
        for (u32 tokens : {0u, 1u, 2u, 17u, 1024u, 1025u, 4097u, 131072u}) {
            const u64 per_item = combine_tokens_per_item(tokens, groups);
            const u64 covered = combine_items(tokens, groups) * per_item;
            REQUIRE(covered >= tokens, "%u tokens", tokens);
            REQUIRE(tokens == 0 || covered - per_item < tokens, "an empty item: %u tokens", tokens);
        }
    }
}

// CTAs claim products in order and finish them in any.
void check_router(u32 tokens, u32 experts, u32 num_ctas, std::mt19937& random) {
    std::vector<u32> logits(static_cast<size_t>(tokens) * experts);  // how often each was computed
    std::vector<u32> working;                                        // products that CTAs are at
    const u32 num_products = router_products(tokens, experts);
    u32 claimed = 0;
    while (claimed < num_products || !working.empty()) {
        while (working.size() < num_ctas && claimed < num_products) working.push_back(claimed++);
        std::swap(working[random() % working.size()], working.back());
        const RouterProduct product = router_product(working.back(), experts);
        working.pop_back();
        REQUIRE(product.first_token < tokens && product.first_expert < experts, "an empty product: %u, %u",
                product.first_token, product.first_expert);
        for (u32 t = product.first_token; t < smaller(product.first_token + kRouterTokens, tokens); ++t) {
            for (u32 e = product.first_expert; e < smaller(product.first_expert + kRouterExperts, experts); ++e) {
                ++logits[static_cast<size_t>(t) * experts + e];
            }
        }
    }
    for (u32 count : logits) REQUIRE(count == 1, "a logit computed %u times", count);
}

void check_routers() {
    std::mt19937 random(11);
    for (u32 tokens : {1u, 2u, 16u, 17u, 64u, 129u, 1000u, 4097u}) {
        for (u32 experts : {1u, 8u, 60u, 128u, 1024u}) {
            for (u32 num_ctas : {1u, 7u, 132u}) check_router(tokens, experts, num_ctas, random);
        }
    }
}

void check_workspace() {
    const u64 mebibyte = 1 << 20;
    for (u32 tokens : {1u, 16u, 1024u, 16384u, 131072u}) {
        const WorkspaceShape shape{tokens, 8, 128, 2048, 768, 128, 0};
        const WorkspaceLayout layout = workspace_layout(shape);
        const u64 rows = static_cast<u64>(tokens) * 8;
        REQUIRE(layout.hidden == 0 && layout.slots >= rows * 768 * 2, "slots at %llu", layout.slots);
        REQUIRE(layout.sorted_rows - layout.slots >= rows * 2048 * 2, "sorted rows at %llu", layout.sorted_rows);
        REQUIRE(layout.total_bytes <= rows * 5 * 2048 + rows * 768 * 2 + 32 * mebibyte, "%llu bytes for %u tokens",
                layout.total_bytes, tokens);
    }
}

int main(int argc, char** argv) {
    static_assert(sizeof(TokenBlock) == 16 && sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "device layouts");
    if (argc == 9 && std::strcmp(argv[1], "layout") == 0) {
        u32 n[7];
        for (int i = 0; i < 7; ++i) n[i] = static_cast<u32>(std::stoul(argv[2 + i]));
        const WorkspaceLayout layout = workspace_layout({n[0], n[1], n[2], n[3], n[4], n[5], n[6]});
        std::printf("%llu %llu %llu %llu %llu %llu %llu %llu %llu %llu %zu %zu\n", layout.hidden, layout.slots,
                    layout.sorted_rows, layout.block_list, layout.hidden_ready, layout.chunk_counts, layout.logits,
                    layout.routed_ids, layout.routed_weights, layout.total_bytes, sizeof(MoeParams),
                    sizeof(ControlBlock));
        return 0;
    }
    check_blocks();
    check_routings();
    check_sort_chunks();
    check_combine();
    check_routers();
    check_workspace();
    return 0;
}
