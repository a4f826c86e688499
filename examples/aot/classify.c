/* Says which digits images show: classify IMAGE.pgm ...
 *
 * All images go through the model in one call. Needs digits.h and digits.so (or digits.o) from export_digits.py and nothing else.
 */
#include "digits.h"

#include <stdio.h>
#include <stdlib.h>

enum { SIDE = 8, CLASSES = 10 };

/* Reads a binary portable graymap of 8 x 8 pixels; 0 when it is one. */
static int read_pgm(const char *path, uint8_t *pixels) {
    FILE *file = fopen(path, "rb");
    int width, height, largest, good;
    if (!file) {
        perror(path);
        return 1;
    }
    good = fscanf(file, "P5 %d %d %d", &width, &height, &largest) == 3 && width == SIDE && height == SIDE && largest == 255 &&
           fgetc(file) != EOF && fread(pixels, 1, SIDE * SIDE, file) == SIDE * SIDE;
    fclose(file);
    if (!good) fprintf(stderr, "%s: not a P5 image of %d x %d pixels\n", path, SIDE, SIDE);
    return !good;
}

int main(int argc, char **argv) {
    int64_t batch = argc - 1, i, k;
    int64_t in_sizes[4] = {batch, 1, SIDE, SIDE}, out_sizes[2];
    torch_hlo_tensor in = {0, (uint64_t)batch * SIDE * SIDE, in_sizes, TORCH_HLO_U8, 4}, out = {0, 0, out_sizes, 0, 0};
    torch_hlo_error error;
    uint64_t workspace_bytes;
    uint8_t *images;
    float *scores;
    void *workspace;

    if (argc < 2) {
        fprintf(stderr, "usage: %s IMAGE.pgm ...\n", argv[0]);
        return 2;
    }
    if (digits_plan(&in, 1, &out, 1, &workspace_bytes, &error)) { /* how much memory these inputs need */
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    images = malloc(in.nbytes);
    scores = malloc(out.nbytes);
    workspace = malloc(workspace_bytes);
    if (!images || !scores || !workspace) return perror("malloc"), 1;
    for (i = 0; i < batch; i++)
        if (read_pgm(argv[1 + i], images + i * SIDE * SIDE)) return 1;

    if (digits(batch, images, scores, workspace, workspace_bytes, &error)) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    for (i = 0; i < batch; i++) {
        const float *score = scores + i * CLASSES;
        int best = 0;
        for (k = 1; k < CLASSES; k++)
            if (score[k] > score[best]) best = (int)k;
        printf("%s: %d (%.1f%%)\n", argv[1 + i], best, 100 * score[best]);
    }
    free(images);
    free(scores);
    free(workspace);
    return 0;
}
